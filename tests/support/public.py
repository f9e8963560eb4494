"""What a user may name: the names of `rlgraph`, of its subjects and of `rlgraph.algorithms`, by their spellings."""

import inspect

import rlgraph as rg
from rlgraph import algorithms, errors


def names_of(subject: str) -> dict[str, object]:
    public = {name: value for name, value in vars(getattr(rg, subject)).items() if not name.startswith("_")}
    raised = {name: value for name, value in public.items() if inspect.isclass(value) and issubclass(value, errors.RlgraphError | Warning)}
    return raised if subject == "errors" else public


BY_SUBJECT = {f"{subject}.{name}": value for subject in rg._SUBJECTS for name, value in names_of(subject).items()}
PUBLIC = {
    **{name: getattr(rg, name) for name in rg.__all__},
    **BY_SUBJECT,
    **{f"algorithms.{name}": getattr(algorithms, name) for name in algorithms.__all__},
}


def unique_values() -> list[object]:
    """Each value once, though it may have several spellings."""
    return list({id(value): value for value in PUBLIC.values()}.values())
