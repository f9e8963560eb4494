"""The names of a trainer's parameters in an exported folder: those of the folder that the model came from."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from rlgraph.engines.hf_models.pretrained import parameter_shapes
from rlgraph.engines.hf_models.text_part import is_head
from rlgraph.errors import ExportError

Numbers = tuple[int, ...]
HEAD = "score.weight"  # of a critic; its folder may be a language model's, without one


def exported(
    shapes: Mapping[str, Numbers], model: str | Path, scores: Literal["log_probs", "values"], where: str
) -> dict[str, tuple[str, Numbers]]:
    """Name the parameters of a trainer, given with their whole shapes, as the model's folder does: (trainer's name, shape) by each name.

    A head that is tied to the embeddings is left out: readers tie it again. A critic's backbone gets the prefix that it has in the folder.

    Raises ExportError for a parameter that the folder knows under no name, or in another shape, and for one that the trainer lacks.
    """
    known = parameter_shapes(model)
    found: dict[str, tuple[str, Numbers]] = {}
    for name, shape in shapes.items():
        if is_head(name) and name not in known:  # it is the embeddings
            continue
        own = name if name in known or (scores == "values" and name == HEAD) else _prefixed(name, known)
        if own is None or known.get(own, shape) != shape:
            there = f"has the shape {list(known[own])}" if own is not None else "has no such name"
            raise ExportError(
                f"{where}: the trainer's parameter '{name}' {list(shape)} {there} in the model's folder '{model}'; an export keeps the "
                "names of that folder, which other programs read, and this architecture's differ in memory: it cannot be exported yet"
            )
        found[own] = name, shape
    lacks = sorted(name for name in known.keys() - found.keys() if not is_head(name)) if scores == "log_probs" else []
    if lacks:
        raise ExportError(f"{where}: the trainer holds no {lacks[:3]}, which the model's folder '{model}' has; it is of another model")
    return found


def _prefixed(name: str, known: Iterable[str]) -> str | None:
    return min((own for own in known if own.endswith(f".{name}")), key=len, default=None)
