"""The keys of a plan in JSON: those that an older version wrote, and those that mean nothing."""

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[tuple[str, ...], Mapping[str, str]] = {  # by where in a plan, what the key was called and what it is called now
    ("schedule", "dependencies"): {"tokens": "credits"},
    ("schedule", "events"): {"part": "chunk"},
    ("channels",): {"tokens": "credits", "parts": "chunks"},
    ("nodes", "passes"): {"parts": "mini_batches"},
    ("loops",): {"freshest": "latest"},
    ("prediction",): {"critical_tokens": "critical_credits"},
}


def with_new_names(plan: Any) -> Any:
    """Rename the old keys of a plan that was decoded from JSON; other values stay as they are.

    >>> with_new_names({"channels": [{"name": "rollout", "tokens": 1}]})
    {'channels': [{'name': 'rollout', 'credits': 1}]}
    """
    for place, names in RENAMED.items():
        plan = _renamed(plan, place, names)
    return plan


def _renamed(value: Any, place: tuple[str, ...], names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, place, names) for item in value]
    if not isinstance(value, dict):
        return value
    if place:
        return {key: _renamed(item, place[1:], names) if key == place[0] else item for key, item in value.items()}
    return {names.get(key, key): item for key, item in value.items()}


def unknown_keys(raw: Any, known: Any, where: str) -> list[str]:
    """List the places of the keys in `raw` that `known`, the plan that was made of it, does not have.

    >>> unknown_keys({"nodes": [{"name": "rollout", "colour": 1}]}, {"nodes": ({"name": "rollout"},)}, "plan")
    ['plan.nodes[0].colour']
    """
    if isinstance(raw, dict) and isinstance(known, dict):
        return [f"{where}.{key}" for key in raw if key not in known] + [
            place for key in raw if key in known for place in unknown_keys(raw[key], known[key], f"{where}.{key}")
        ]
    if isinstance(raw, list) and isinstance(known, list | tuple):
        return [place for i, (a, b) in enumerate(zip(raw, known, strict=False)) for place in unknown_keys(a, b, f"{where}[{i}]")]
    return []
