"""Megatron-Core publishes its float32 weights from where they are, by one call for all of them, as boxes that need no putting together."""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_mixture, tiny_qwen
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph.channels.host.channel import HostReader, HostWriter
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf.pretrained import parameter_shapes
from rlgraph.values.optimizers import AdamW

pytestmark = [
    pytest.mark.stage("plugins"),
    pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"),
]
NOTHING = {"aten::detach", "aten::alias", "aten::view", "aten::slice"}  # views, which copy nothing


class Calls(TorchDispatchMode):
    """Counts what computes or copies, and the bytes that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in NOTHING:
            self.count[name] += 1
        if name == "aten::_foreach_copy_":
            self.bytes += sum(tensor.nbytes for tensor in args[0] if tensor.is_floating_point())  # and not what describes them
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["qwen2", "qwen3", "moe"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """A trainer that computes in bfloat16, of a model whose queries are of two groups of heads, and its folder."""
    from support.trainer_engines import megatron_engine

    folder = tiny_mixture(tmp_path / "moe") if request.param == "moe" else tiny_qwen(tmp_path, request.param)
    made = megatron_engine(PolicyHead(folder), optimizer=AdamW())
    yield made, folder
    made.close()


def test_every_box_is_one_range_of_a_float32_weight(engine: tuple[Any, Path]) -> None:
    trainer, folder = engine
    shards = list(trainer.weight_shards())
    memories = {weight.untyped_storage().data_ptr() for weight in trainer._masters.weights.values()}
    assert {shard.name for shard in shards} == parameter_shapes(folder).keys()
    for shard in shards:
        assert shard.is_whole, f"{shard.name} is in pieces"
        assert shard.tensor.is_contiguous(), f"{shard.name} is copied number by number"
        assert shard.tensor.untyped_storage().data_ptr() in memories, f"{shard.name} is a copy"
        assert shard.tensor.dtype == torch.float32


def test_a_version_is_published_by_one_call_and_received_without_a_copy(engine: tuple[Any, Path], tmp_path: Path) -> None:
    trainer, folder = engine
    writer = HostWriter("weights", 1, 1, b"key", f"{tmp_path}/w")
    reader = HostReader("weights", b"key", f"{tmp_path}/w", 5.0)
    sending, receiving = WeightsWriter(writer, torch.bfloat16), WeightsReader([reader], buffers=1)
    for version in (1, 2):
        for shard in trainer.weight_shards():
            shard.tensor.add_(0.25)
        with Calls() as calls:
            sending.publish(version, trainer.weight_shards(), 5.0)
            sent = Counter(calls.count)
            found = receiving.receive(version, 5.0)
        if version == 2:  # the first one describes the boxes
            assert sent == {"aten::_foreach_copy_": 1}, "tensor by tensor, or the host waits"
            assert calls.count == sent, "received as it lies"
            assert calls.bytes == 2 * sum(torch.Size(shape).numel() for shape in parameter_shapes(folder).values())
        for shard in trainer.weight_shards():
            assert torch.equal(found[shard.name], shard.tensor.bfloat16()), shard.name
        receiving.release()
    writer.close()
    reader.close()
