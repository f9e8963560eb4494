"""Layers that compute again in the backward pass: the same steps, and operations that run as often as the setting says."""

import json
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func, min_cut_rematerialization_partition
from support.families import folder_of
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

import rlgraph as rg
from rlgraph.engines.forward import self_test
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.recompute import SavedActivations
from rlgraph.engines.fsdp.sharding import local
from rlgraph.errors import GraphError
from rlgraph.settings import Recompute

LAYERS = 2
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[operation.name().partition(".")[0]] += 1
        return operation(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    found = {name: folder_of(name, parent) for name in ("llama", "qwen3_moe", "gemma2", "olmo", "opt", "jetmoe")}
    config = found["olmo"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clip_qkv": 0.5}))
    return found


def updated(folder: Path, *, count: bool = True, **settings: Any) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """The gradients of a batch, as Adam's first moments have them, and the operations of the update."""
    batch = self_test._batch()
    batch["advantages"] = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(1))
    engine = fsdp_engine(PolicyHead(folder), optimizer=rg.AdamW(lr=1e-3, grad_clip=1e9), dtype=torch.float32, **settings)
    counted = Counted()
    with closing(engine):
        with counted if count else nullcontext():
            engine.update(batch, WeightedLikelihood())
        return {name: local(moment).clone() for name, moment in engine.state().items() if name.endswith("exp_avg")}, counted.calls


@pytest.mark.parametrize(("name", "more"), [("llama", {"adapter": rg.LoRA(rank=4)}), ("qwen3_moe", {}), ("gemma2", {})], ids=str)
def test_gradients_are_those_of_layers_that_keep_all(name: str, more: dict[str, Any], folders: dict[str, Path]) -> None:
    kept, part, whole = (updated(folders[name], flat=True, recompute=way, **more)[0] for way in (False, "selective", True))
    assert kept
    for parameter, gradient in kept.items():
        assert torch.equal(gradient, part[parameter]), parameter
        assert torch.equal(gradient, whole[parameter]), parameter


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", ["olmo", "opt", "jetmoe"])  # clips in place; has dropout; is not recomputed by transformers
def test_layers_that_change_results_in_place_or_know_dropout_have_the_same_gradients(name: str, folders: dict[str, Path]) -> None:
    ways: tuple[Recompute, ...] = (False, "selective", True)
    kept, part, whole = (updated(folders[name], count=False, flat=name != "jetmoe", recompute=way)[0] for way in ways)
    for parameter, gradient in kept.items():
        for found in (part[parameter], whole[parameter]):
            assert (found - gradient).norm() <= 1e-4 * gradient.norm(), parameter


@pytest.mark.parametrize(("name", "again"), [("llama", (2, 6)), ("qwen3_moe", (1, 5))])  # gate and up, or the router; and q, k, v, o
def test_attention_and_its_products_run_once_with_selective(name: str, again: tuple[int, int], folders: dict[str, Path]) -> None:
    kept, part, whole = (updated(folders[name], flat=True, recompute=way)[1] for way in (False, "selective", True))
    assert kept[ATTENTION] == part[ATTENTION] == whole[ATTENTION] // 2 > 0
    assert [calls["aten::mm"] - kept["aten::mm"] for calls in (part, whole)] == [LAYERS * each for each in again]


@pytest.mark.parametrize(("inner", "outer", "kept"), [(2560, 4096, True), (2560, 16, True), (16, 4096, False)], ids=["q", "A", "B"])
def test_the_second_matrix_of_an_adapter_is_computed_again(inner: int, outer: int, kept: bool) -> None:
    states, matrix = torch.empty(8, inner, device="meta"), torch.empty(inner, outer, device="meta")
    for again in (False, True):
        policy = SavedActivations(with_output=True)(
            SelectiveCheckpointContext(is_recompute=again), torch.ops.aten.mm.default, states, matrix
        )
        assert policy is (CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE)


@pytest.mark.stage("families")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
def test_compiled_layers_keep_and_compute_again_what_eager_ones_do(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []  # of each graph, the forward one before its backward one

    def counting(graph: Any, given: Any) -> Any:
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def backend(module: Any, given: Any) -> Any:
        compilers = {"fw_compiler": counting, "bw_compiler": counting}
        return aot_module_simplified(module, given, **compilers, partition_fn=min_cut_rematerialization_partition)

    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: plain(self, backend=backend, **given))
    torch._dynamo.reset()
    compiled, _ = updated(folders["llama"], count=False, flat=False, compiled=True, recompute="selective")
    torch._dynamo.reset()
    eager, _ = updated(folders["llama"], flat=False)
    for parameter, gradient in eager.items():
        torch.testing.assert_close(compiled[parameter], gradient, atol=5e-6, rtol=5e-6)
    assert {7, 16} == set(products)  # all that keeps has 14 in its backward graph: gate and up are computed again


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(GraphError, match=r"recompute='all'\): recompute is True or False or one of \['selective'\]"):
        rg.Policy("tiny", pool=rg.Pool("train"), recompute="all")
    with pytest.raises(GraphError, match="write recompute='selective'"):
        rg.Policy("tiny", pool=rg.Pool("train"), recompute="Selective")
