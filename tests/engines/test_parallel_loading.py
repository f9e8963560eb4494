"""An engine that spans GPUs: where its weights lie is said in a message, and each rank copies its own part of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import PROGRAMS, PYTHONPATH
from support.tiny import tiny_qwen

from rlgraph.channels.host.slot_memory import Handle
from rlgraph.channels.weights.endpoints import are_contiguous, flat_buffer
from rlgraph.engines.vllm.weights import RankWeights, describe, view_weights

HANDLE = Handle(4096, b"memory", 8192, 512, b"counter", 3, b"event", True)
KINDS = {"a": (torch.Size([3, 5]), torch.bfloat16), "b": (torch.Size([7]), torch.float32), "c": (torch.Size([2, 2]), torch.bfloat16)}


def filled(version):
    weights = flat_buffer(KINDS, torch.device("cpu"))
    fill(weights, version)
    return weights


def fill(weights, version):
    draw = torch.Generator().manual_seed(version)
    for weight in weights.values():
        weight.copy_(torch.randn(weight.shape, generator=draw))


def bytes_of(weights):
    return torch.empty(0, dtype=torch.uint8).set_(next(iter(weights.values())).untyped_storage())


class Half:
    """The rank's half of the rows of `b`, and all else."""

    def __init__(self, rank):
        self.rank = rank
        self.tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(3), "c": torch.zeros(2, 2, dtype=torch.bfloat16)}

    def parameters(self):
        return list(self.tensors.values())

    def load_weights(self, weights):
        for name, weight in weights:
            self.tensors[name].copy_(weight.narrow(0, 3 * self.rank, 3) if name == "b" else weight)


def test_a_description_gives_the_tensors_and_the_handle_back():
    weights, asked = filled(1), []
    found = view_weights(describe(weights, HANDLE), lambda handle: asked.append(handle) or bytes_of(weights))
    assert asked == [HANDLE]
    assert {name: (w.shape, w.dtype, w.data_ptr()) for name, w in found.items()} == {
        name: (w.shape, w.dtype, w.data_ptr()) for name, w in weights.items()
    }


def test_ranks_load_the_memory_as_it_is_now_and_other_memory_once_described():
    weights, other = filled(1), filled(2)
    for rank in (0, 1):
        fill(weights, 1)
        model = Half(rank)
        loading = RankWeights(model)
        loading.map(describe(weights, HANDLE), lambda handle: bytes_of(weights))
        for source, version in ((weights, 1), (weights, 3), (other, 2)):
            if source is other:
                loading.map(describe(other, HANDLE), lambda handle: bytes_of(other))
            fill(source, version)
            loading.load()
            assert loading.plan is not None
            assert torch.equal(model.tensors["a"], source["a"])
            assert torch.equal(model.tensors["b"], source["b"][3 * rank : 3 * rank + 3])
            assert torch.equal(model.tensors["c"], source["c"])


def test_a_rank_that_forgets_keeps_nothing_of_the_memory():
    weights = filled(1)
    memory, loading = bytes_of(weights), RankWeights(Half(0))
    storage = memory.untyped_storage()

    def holders():
        return torch._C._storage_Use_Count(storage._cdata)

    before = holders()
    loading.map(describe(weights, HANDLE), lambda handle: memory)
    for _ in range(2):  # recorded, and replayed
        loading.load()
    assert holders() > before
    loading.forget()
    assert holders() == before


def test_only_contiguous_tensors_in_one_memory_lie_together():
    weights = filled(1)
    assert are_contiguous(weights)
    assert not are_contiguous(weights | {"b": weights["b"].clone()})
    assert not are_contiguous(weights | {"a": weights["a"][:, :2]})


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_each_rank_of_vllms_models_replays_what_its_loader_leaves(tied: Path, untied: Path, tmp_path: Path) -> None:
    folders = [str(folder) for folder in (tied, untied, tiny_qwen(tmp_path, "qwen2"), tiny_qwen(tmp_path, "qwen3"))]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, str(PROGRAMS / "parallel_process.py"), *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for folder in folders:
        assert [rank["equal"] for rank in found[folder]] == [3, 3], folder
        copied, whole = sum(rank["copied"] for rank in found[folder]), found[folder][0]["whole"]
        assert whole <= copied < 1.15 * whole, "the ranks copy all once, but for norms and shared heads, which both have"
