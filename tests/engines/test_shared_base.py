"""Trainers of adapters of one folder hold its frozen weights once: the models of a process, and the processes of a host."""

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.base_holders import BIG, NUMBERS, SEGMENT, fill_tensor, hold_base
from programs.lora_ranks import engine_of, train_adapter
from support.forked_workers import server
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward.head import ValueHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.lora import ALIGNMENT, HostBase, SharedBase, ThreadBase
from rlgraph.values.lora import LoRA
from rlgraph.values.optimizers import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")


def bases(kind: str, folder: Path, count: int) -> list[SharedBase]:
    """What several models of a process take their base from."""
    here = ThreadBase()
    return [here if kind == "process" else HostBase(folder / "base") for _ in range(count)]


def frozen(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """The frozen weights by the tensors of the folder that they are."""
    found = {n.removeprefix("model.").removeprefix("model."): p for n, p in engine._head.named_parameters() if not p.requires_grad}
    return {name: parameter.detach() for name, parameter in found.items()}


@pytest.mark.parametrize(
    ("model", "kind", "dtype"), [("tied", "process", torch.bfloat16), ("tied", "host", torch.float32), ("untied", "host", torch.bfloat16)]
)
def test_with_a_shared_base_models_train_with_the_same_bits(
    model: str, kind: str, dtype: torch.dtype, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(model)
    given: list[dict[str, Any]] = [{}, {"adapter": LoRA(rank=2, targets=("q_proj", "down_proj"), seed=5)}]
    alone, together = [], []
    for number, own in enumerate(given):
        engine = engine_of(folder, dtype=dtype, **own)
        alone.append(train_adapter(engine, tmp_path / f"alone {number}"))
        engine.close()
    shared = bases(kind, tmp_path, 2)
    engines = [engine_of(folder, dtype=dtype, shared_base=base, **own) for base, own in zip(shared, given, strict=True)]
    for number, engine in enumerate(engines):
        together.append(train_adapter(engine, tmp_path / f"together {number}"))
    for one, other in zip(alone, together, strict=True):
        assert other["resumed"]
        assert one["metrics"] == other["metrics"]
        assert one["third"] == other["third"]
        assert all(torch.equal(one[what], other[what]) for what in ("scores", "base", "base after"))
        for a, b in zip(one["weights"], other["weights"], strict=True):
            assert a.name == b.name
            assert torch.equal(a.tensor, b.tensor)
    left, right = map(frozen, engines)
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in left.values())
    if kind == "process":
        assert all(tensor.data_ptr() == right[name].data_ptr() for name, tensor in left.items())
    for engine in engines:
        engine.close()


def test_a_critic_holds_the_layers_of_a_policy_and_its_own_head(untied: Path) -> None:
    base = ThreadBase()
    policy = engine_of(untied, shared_base=base)
    critic = fsdp_engine(ValueHead(untied), optimizer=AdamW(), dtype=torch.float32, adapter=LoRA(rank=2), shared_base=base)
    left, right = frozen(policy), frozen(critic)
    assert left.keys() - right.keys() == {"lm_head.weight"}
    assert right.keys() < left.keys()
    assert all(tensor.data_ptr() == left[name].data_ptr() for name, tensor in right.items())
    assert {"score.weight"} < critic.trained_parameters().keys()
    policy.close()
    critic.close()


@pytest.fixture
def holders() -> Iterator[Any]:
    """Start processes that take the base at a path, and hold it."""
    begun: list[tuple[Any, Connection]] = []

    def hold_at(path: Path) -> tuple[Any, dict[str, Any]]:
        here, there = server.Pipe()
        process = server.Process(target=hold_base, args=(path, there), daemon=True)
        process.start()
        begun.append((process, here))
        assert here.poll(60)
        return process, here.recv()

    yield hold_at
    for process, _ in begun:
        process.kill()
        process.join()


def test_processes_hold_a_base_in_memory_once(holders: Any, tmp_path: Path) -> None:
    (_, first), (_, second), (_, third) = (holders(tmp_path / "base") for _ in range(3))
    assert first["filled"] == list(NUMBERS)
    assert second["filled"] == third["filled"] == []
    assert first["sums"] == second["sums"] == third["sums"]
    for found in (second, third):
        assert found["rss"] >= 4 * BIG
        assert found["private"] == 0
    assert third["pss"] <= 4 * BIG / 3 + 3 * 4096  # a page that only some have touched counts more


def test_what_one_process_writes_no_other_sees(tmp_path: Path) -> None:
    first, second = (HostBase(tmp_path / "base").take({"one": ((4,), torch.float32)}, fill_tensor)["one"] for _ in range(2))
    first.zero_()
    assert second.tolist() == [NUMBERS["one"]] * 4
    assert HostBase(tmp_path / "base").take({"one": ((4,), torch.float32)}, fill_tensor)["one"].tolist() == [NUMBERS["one"]] * 4


def test_who_comes_after_the_first_has_died_loads_the_base_again(holders: Any, tmp_path: Path) -> None:
    first, _ = holders(tmp_path / "base")
    _, second = holders(tmp_path / "base")
    first.kill()
    first.join()
    _, third = holders(tmp_path / "base")
    assert third["filled"] == list(NUMBERS)
    assert third["sums"] == second["sums"]


def test_a_handle_of_another_file_is_not_taken_for_the_base(tmp_path: Path) -> None:
    first = HostBase(tmp_path / "base")
    first.take({"one": ((4,), torch.float32)}, fill_tensor)
    assert first._handle is not None
    with (tmp_path / "other").open("wb+") as other:
        other.truncate(1 << 16)
        os.dup2(other.fileno(), first._handle, inheritable=False)  # as if the process were another one of that number
        assert HostBase(tmp_path / "base").take({"one": ((4,), torch.float32)}, fill_tensor)["one"].tolist() == [NUMBERS["one"]] * 4


def test_a_load_that_fails_leaves_nothing_that_others_would_take(tmp_path: Path) -> None:
    def breaks(name: str, out: torch.Tensor) -> None:
        out.fill_(-1.0)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        HostBase(tmp_path / "base").take({"one": ((4,), torch.float32)}, breaks)
    assert HostBase(tmp_path / "base").take({"one": ((4,), torch.float32)}, fill_tensor)["one"].tolist() == [NUMBERS["one"]] * 4


def test_a_model_with_more_weights_adds_those_that_lack(tmp_path: Path) -> None:
    two = dict.fromkeys(("one", "two"), ((33,), torch.bfloat16))
    first = HostBase(tmp_path / "base")
    kept = first.take({"one": two["one"]}, fill_tensor)["one"]
    asked: list[str] = []

    def fill(name: str, out: torch.Tensor) -> None:
        asked.append(name)
        fill_tensor(name, out)

    found = HostBase(tmp_path / "base").take(two, fill)
    assert asked == ["two"]
    assert kept.tolist() == found["one"].tolist() == [NUMBERS["one"]] * 33
    assert found["two"].tolist() == [NUMBERS["two"]] * 33
    assert found["two"].data_ptr() % ALIGNMENT == 0
    assert SEGMENT in Path("/proc/self/maps").read_text()
