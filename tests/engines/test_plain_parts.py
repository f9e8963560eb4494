"""A pass of ranks that share matrices computes with plain tensors, and launches little more than that of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_workers import server
from support.tiny import WeightedLikelihood, batch_of, tiny_qwen
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.stage("ranks")

MORE = 1.3  # launches of two ranks over those of one: exchanges, and the step of gradients


def update_of(folder: str, world: int, results: Any) -> None:
    """Update on one of `world` ranks whose collectives do nothing: put how often torch was called, and what passes computed with."""
    from support.trainer_engines import fsdp_engine

    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.values.optimizers import AdamW

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    given: dict[str, Any] = {"flat": True, "recompute": True, "micro_batch_tokens": 48, "tensor_parallel": world}
    head = PolicyHead(folder)
    engine = fsdp_engine(head, optimizer=AdamW(), rank=0, world=world, dtype=torch.float32, **given)
    kinds: set[type] = set()

    def note(module: torch.nn.Module, *_: object) -> None:
        kinds.update(DTensor if isinstance(one, DTensor) else torch.Tensor for one in module.parameters(recurse=False))

    for module in head.model.modules():
        module.register_forward_hook(note)
    batch, loss = batch_of([7, 2, 5, 5, 1, 12]), WeightedLikelihood()
    engine.update(batch, loss)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.update(batch, loss)
    results.put((len([event for event in profiled.events() if event.name.startswith("aten::")]), [kind.__name__ for kind in kinds]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, list[str]]]:
    folder = tiny_qwen(tmp_path_factory.mktemp("models"), "qwen3", layers=6)
    results = {}
    for world in (1, 2):
        queue = server.SimpleQueue()
        process = server.Process(target=update_of, args=(str(folder), world, queue), daemon=True)
        process.start()
        process.join(100)
        assert process.exitcode == 0
        results[world] = queue.get()
    return results


def test_a_pass_computes_with_plain_tensors(found: dict[int, tuple[int, list[str]]]) -> None:
    assert [kinds for _, kinds in found.values()] == [["Tensor"]] * 2


def test_an_update_of_ranks_that_share_matrices_calls_torch_little_more_often(found: dict[int, tuple[int, list[str]]]) -> None:
    assert found[1][0] < found[2][0] < MORE * found[1][0], {world: calls for world, (calls, _) in found.items()}
