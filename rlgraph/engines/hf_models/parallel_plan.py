"""How the ranks of a model may share it: the plans of transformers that are known here, and the numbers that the ranks divide."""

from pathlib import Path
from typing import Any

from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.text_part import text_config
from rlgraph.errors import GraphError, shown
from rlgraph.plan.estimates import ring_ranks, undivided

COLUMNS, ROWS = "colwise", "rowwise"
KNOWN = {COLUMNS, ROWS, "replicated_with_grad_allreduce", "embedding_rowwise"}
EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen3_moe")  # by tests/engines/test_sharing_experts.py
FAMILIES = ("llama", "qwen2", "qwen3")  # by tests/engines/test_sharing_ranks.py


def plan_of(config: Any) -> dict[str, str]:
    """Look up which projections of a model are cut by columns and which by rows, as patterns of their names."""
    plan: dict[str, str] = config.base_model_tp_plan or {}
    return plan


def check_folder_parallel(where: str, path: str | Path, *, tensor: int = 1, context: int = 1) -> None:
    """Check that ranks can share the model of a folder. Raises as `check_parallel` does."""
    check_model(path)
    check_parallel(where, text_config(path), tensor=tensor, context=context)


def check_parallel(where: str, config: Any, *, tensor: int = 1, context: int = 1, ring: int | None = None) -> None:
    """Check that ranks can share a model of this configuration, `ring` of which pass keys round; None: as many as heads leave.

    Raises GraphError for a family that is not known here, heads or a vocabulary that the ranks do not divide, or windows in a ring.
    """
    given = f"{where}({', '.join(f'{name}={size}' for name, size in _asked(tensor, context))})"
    kind = config.model_type
    if kind not in FAMILIES:
        raise GraphError(f"{given}: models of type {shown(kind)} are not shared by ranks; it is offered for {', '.join(FAMILIES)}")
    unknown = sorted(set(plan_of(config).values()) - KNOWN) if tensor > 1 else []
    if unknown or not plan_of(config):
        raise GraphError(
            f"{given}: the plan that transformers has for {shown(kind)} asks for {unknown or 'nothing'}, which is not known here"
        )
    sizes = config.num_attention_heads, config.num_key_value_heads, config.vocab_size, config.intermediate_size
    ring = ring_ranks(config.num_attention_heads, tensor=tensor, context=context) if ring is None else ring
    if context % ring:
        raise GraphError(f"{given}: a ring of {ring} does not divide context_parallel={context}; every place has as many ranks")
    found = undivided(*sizes, tensor=tensor, context=context // ring)
    if found is not None:
        name, size, settings = found
        raise GraphError(
            f"{given}: the model has {name}={size}, which {settings} does not divide; every rank has as many: choose a divisor of {size}"
        )
    if ring > 1 and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        heads = config.num_attention_heads
        raise GraphError(
            f"{given}: the model has sliding windows, and num_attention_heads={heads}, which the ranks do not divide: they would pass keys "
            f"round in a ring, which windows are not offered for; choose ranks of which tensor × context is a divisor of {heads}"
        )


def check_folder_experts(where: str, path: str | Path, expert: int) -> None:
    """Check that ranks can share the experts of the model of a folder. Raises as `check_experts` does."""
    check_model(path)
    check_experts(where, text_config(path), expert)


def check_experts(where: str, config: Any, expert: int) -> None:
    """Check that `expert` ranks can share the experts of a model of this configuration.

    Raises GraphError for a model without experts, a family that is not known here, and experts that the ranks do not divide.
    """
    given, kind = f"{where}(expert_parallel={expert})", config.model_type
    name = next((name for name in ("num_experts", "num_local_experts") if getattr(config, name, None)), None)
    if name is None:
        raise GraphError(f"{given}: the model has no experts; leave out expert_parallel")
    if kind not in EXPERT_FAMILIES:
        raise GraphError(
            f"{given}: experts of models of type {shown(kind)} are not shared by ranks; it is offered for {', '.join(EXPERT_FAMILIES)}"
        )
    size = getattr(config, name)
    if size % expert:
        raise GraphError(
            f"{given}: the model has {name}={size}, which expert_parallel={expert} does not divide; every rank has as many: choose a "
            f"divisor of {size}"
        )


def _asked(tensor: int, context: int) -> list[tuple[str, int]]:
    return [(name, size) for name, size in (("tensor_parallel", tensor), ("context_parallel", context)) if size > 1]
