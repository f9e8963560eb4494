"""Costs as a YAML file that people read and change."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from rlgraph.costs.functions import number_or_function
from rlgraph.errors import PlanError, choices

C = TypeVar("C")
NOTHING_AGAIN = "recompute", False  # is known, where the default is not
HEAD = """\
# What each node of a graph costs, in seconds: rlgraph.Costs.from_file reads it. A node's cost is a number of seconds, or the
# seconds by count of devices, as {1: 38.2, 2: 19.0}, or
#   serial_s + (parallel_s + token_s * tokens) / devices, where a pass of training on a GPU takes at least pass_s, or sharded_pass_s
#   where ranks share the model; and for a generator `decode`: start_s + prefill_s * prompt tokens + step_s * (longest response)
#   + sequence_s * (response tokens), by engine.
# `measured` is the setting it was taken at, `spread` single firings over what the function gives, `lengths` the quantiles of the responses.
"""


def written(costs: object) -> str:
    """Format costs as YAML."""
    raw = msgspec.to_builtins(costs)
    short = {**_short(raw), "nodes": {name: _cost(_short(cost)) for name, cost in raw["nodes"].items()}}
    text: str = yaml.safe_dump(short, sort_keys=False, default_flow_style=None, width=120)
    return HEAD + text


def _cost(value: Any) -> Any:
    """Write seconds by device count alone as people do: {1: 38.2, 2: 19.0}."""
    return dict(value["by_devices"]) if isinstance(value, dict) and list(value) == ["by_devices"] else value


def _short(value: Any) -> Any:
    """Round the values to six digits, and leave out zeros and empty values, which are the defaults."""
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items() if part not in (None, "", [], (), 0) or (key, part) == NOTHING_AGAIN}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(path: str | Path, kind: type[C]) -> C:
    """Read the costs of a file as the dataclass `kind`. Raises PlanError naming the file and the place in it."""
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"costs file '{path}': there is no such file; write one with job.costs().to_file('{path}')")
    try:
        raw = msgspec.yaml.decode(file.read_text(encoding="utf-8"))
        for name, cost in _nodes(raw).items():
            if isinstance(cost, dict) and cost and all(isinstance(key, int) for key in cost):
                number_or_function(name, cost)
                raw["nodes"][name] = {"by_devices": [list(pair) for pair in sorted(cost.items())]}
        _rename_old_keys(raw)
        costs = msgspec.convert(raw, kind)
        _check_keys("costs", raw, costs)
        return costs
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PlanError(f"costs file '{path}': {error}; it holds what Costs.to_file writes: nodes, each with its seconds") from None
    except PlanError as error:
        raise PlanError(f"costs file '{path}': {error}") from None


def _rename_old_keys(raw: Any) -> None:
    """Rename what an older version called otherwise: the `parts` of passes are `mini_batches`."""
    for cost in _nodes(raw).values():
        measured = cost.get("measured") if isinstance(cost, dict) else None
        passes = measured.get("passes") if isinstance(measured, dict) else None
        if isinstance(passes, dict) and "parts" in passes:
            passes["mini_batches"] = passes.pop("parts")


def _nodes(raw: Any) -> Mapping[str, Any]:
    nodes = raw.get("nodes") if isinstance(raw, dict) else None
    return nodes if isinstance(nodes, dict) else {}


def _check_keys(where: str, raw: Any, made: Any) -> None:
    """Raise PlanError for an unknown key: a misspelt one would otherwise count as 0 seconds."""
    if not isinstance(raw, dict):
        return
    known = made.keys() if isinstance(made, Mapping) else {field.name for field in fields(made)}
    for key, part in raw.items():
        if key not in known:
            raise PlanError(f"{where} has no '{key}'; {choices(key, sorted(known))}")
        _check_keys(f"{where}.{key}", part, made[key] if isinstance(made, Mapping) else getattr(made, key))
