"""Checks of a model that trains an adapter: of its settings where it is declared, of its folder before anything starts."""

from typing import Any

from rlgraph.engines.hf_models.pretrained import ModelSummary
from rlgraph.engines.lora.settings import FAMILIES, LoRA
from rlgraph.engines.optim import Muon
from rlgraph.errors import GraphError
from rlgraph.nodes.training.low_bits import check_four_bits
from rlgraph.plan.model_shapes import ALL_LINEAR, PROJECTIONS


def check_adapter(model: Any) -> None:
    """Raise GraphError for settings that an adapter does not work with."""
    where = f"{type(model).__name__}(adapter=LoRA(rank={model.adapter.rank})"
    if isinstance(model.optimizer, Muon):
        raise GraphError(f"{where}, optimizer=rg.Muon()): its step is one of whole matrices, not of their factors; use rg.AdamW(…)")
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices would have to share the adapter's too, which is "
            "not supported; use data_parallel or context_parallel"
        )
    if model.expert_parallel > 1:
        raise GraphError(
            f"{where}, expert_parallel={model.expert_parallel}): mixtures of experts have no adapters here; leave out expert_parallel"
        )
    if model.adapter.base is not None:
        check_four_bits(model)
    if model.load_balance:
        raise GraphError(f"{where}, load_balance={model.load_balance}): routers of experts are frozen; leave out load_balance")


def check_adapter_folder(model: Any, summary: ModelSummary) -> None:
    """Raise GraphError for an adapter of a family without tests, of targets that it lacks, or unlike the folder in which it begins."""
    lora: LoRA = model.adapter
    where = f"{type(model).__name__}({str(summary.path)!r}, adapter=LoRA(…))"
    if summary.model_type not in FAMILIES or summary.nested:
        raise GraphError(
            f"{where}: adapters are tested for {', '.join(FAMILIES)}, and this model is a '{summary.model_type}'; train it without adapter="
        )
    unknown = [] if lora.targets == ALL_LINEAR else [name for name in lora.targets if name not in PROJECTIONS]
    if unknown:
        raise GraphError(f"{where} has the target '{unknown[0]}'; the layers have {list(PROJECTIONS)}")
    if lora.folder is not None:
        there = LoRA.load(lora.folder)
        if (there.rank, there.alpha, _targets(there)) != (lora.rank, lora.alpha, _targets(lora)):
            raise GraphError(
                f"{where} begins in '{lora.folder}', whose rank, alpha and targets are {there.rank}, {there.alpha:g} and "
                f"{_targets(there)}; write adapter=rg.LoRA.load({lora.folder!r})"
            )


def _targets(lora: LoRA) -> list[str]:
    return sorted(PROJECTIONS if lora.targets == ALL_LINEAR else lora.targets)
