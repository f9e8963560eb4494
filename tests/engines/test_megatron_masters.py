"""Weights in float32 behind parameters in bfloat16: gradients add up and small steps count, which bfloat16 would round away."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlgraph.engines.fsdp.sharding import init_distributed
from rlgraph.engines.megatron import masters as masters_module
from rlgraph.engines.megatron.masters import Masters, PieceTable

pytestmark = pytest.mark.stage("plugins")

SMALL = 2.0**-10  # beside 1, bfloat16 rounds it away


@pytest.fixture
def alone() -> Iterator[Any]:
    """A rank that shares nothing."""
    init_distributed(0, 1)
    groups = dict.fromkeys(("data_group", "expert_data_group", "tensor_group"), dist.group.WORLD)
    yield SimpleNamespace(tensor=1, data=1, pipeline=1, world=1, stage=0, tensor_rank=0, data_rank=0, **groups)
    dist.destroy_process_group()


def test_gradients_and_steps_that_bfloat16_rounds_away_count(alone: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    masters = Masters({"decoder.final_layernorm.weight": parameter}, PieceTable(None, alone, "model.", tied=False))
    (weight,) = masters.weights.values()
    optimizer = torch.optim.SGD([weight], lr=SMALL)
    for step in range(1, 9):
        masters.begin()
        for gradient in (1.0, SMALL, SMALL):  # of micro-batches
            (parameter * gradient).sum().backward()
        assert parameter.grad is None
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((4,), 1 + 2 * SMALL))
        optimizer.step()
        masters.publish()
        assert torch.equal(parameter, weight.bfloat16())
        torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - step * SMALL * (1 + 2 * SMALL)))
    assert (parameter < 1).all()


def test_a_gradient_is_clipped_to_the_norm_over_all_weights(alone: Any) -> None:
    parameters = {
        f"decoder.layers.0.{name}": torch.nn.Parameter(torch.zeros(1)) for name in ("mlp.router.weight", "input_layernorm.weight")
    }
    masters = Masters(parameters, PieceTable(None, alone, "model.", tied=False))
    masters.begin()
    (3 * parameters["decoder.layers.0.mlp.router.weight"] + 4 * parameters["decoder.layers.0.input_layernorm.weight"]).sum().backward()
    masters.add_up()
    assert masters.clip(1.0) == 5.0
    torch.testing.assert_close([float(weight.grad) for weight in masters.weights.values() if weight.grad is not None], [0.6, 0.8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_values_of_all_parameters_take_one_call_for_each_owner(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, torch.Tensor]] = []

    def called(what: str, part: torch.Tensor, of: int) -> SimpleNamespace:
        calls.append((what, of, part))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(masters_module.dist, "get_world_size", lambda group: 2 if group == "data" else 1)
    monkeypatch.setattr(masters_module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(masters_module.dist, "reduce", lambda part, *, group, group_dst, async_op: called("reduce", part, group_dst))
    monkeypatch.setattr(masters_module.dist, "broadcast", lambda part, *, group, group_src, async_op: called("broadcast", part, group_src))
    sizes = {f"layers.{number}.{kind}": size for number in range(12) for kind, size in (("matrix", 300), ("norm", 5))}
    parameters = {name: torch.nn.Parameter(torch.full((size,), float(at), dtype=dtype)) for at, (name, size) in enumerate(sizes.items())}
    owned = masters_module.Owned(parameters, "data", "tensor", ())
    assert all(one.unique().tolist() == [at] for at, one in enumerate(parameters.values())), "moved, not changed"
    gradients = torch.arange(owned.elements, dtype=torch.float32)
    owned.add_up(gradients)
    owned.publish()
    assert [(what, of) for what, of, _ in calls] == [("reduce", 0), ("reduce", 1), ("broadcast", 0), ("broadcast", 1)]
    reduced, sent = [part for what, _, part in calls if what == "reduce"], [part for what, _, part in calls if what == "broadcast"]
    assert torch.equal(torch.cat(reduced), gradients)
    for rank, part in enumerate(sent):
        begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
        within = {name for name, one in parameters.items() if begin <= one.data_ptr() and one.data_ptr() + one.nbytes <= end}
        assert (within == owned.names) == (rank == 0)
        assert len(within) == 12
        assert len(reduced[rank]) == sum(sizes[name] for name in within)
