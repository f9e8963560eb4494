"""An engine of vLLM that sleeps until weights are loaded: after each load its memory is that of an engine that saved all."""

import ctypes
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.engines.lora.merging import A, B, BaseWeights
from rlgraph.engines.vllm import kept_memory
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.engines.vllm.kept_memory import KeptMemory, Span, blocks_of, not_written, written_by

SHAPES = {"embed.weight": (6, 4), "q.weight": (4, 4), "k.weight": (2, 4), "norm.weight": (4,)}
CHANGED = ("q.weight", "k.weight")


def test_a_block_is_not_written_where_a_byte_of_it_is_not() -> None:
    blocks = [Span(0, 8), Span(8, 8), Span(32, 8), Span(40, 8)]
    assert not_written(blocks, [Span(40, 4), Span(4, 8), Span(0, 5), Span(44, 4)]) == [Span(8, 8), Span(32, 8)]
    assert not_written(blocks, []) == blocks
    assert not_written(blocks, [Span(0, 64)]) == []


def test_blocks_are_those_in_use_of_the_weights_and_whole_segments_of_which_torch_knows_nothing() -> None:
    used, freed = {"address": 64, "requested_size": 30, "state": "active_allocated"}, {"address": 128, "size": 64, "state": "inactive"}
    snapshot = [{"address": 64, "blocks": [used, freed]}, {"address": 512, "blocks": [used]}]
    assert blocks_of({64: 128, 256: 32}, snapshot) == [Span(64, 30), Span(256, 32)]


def test_a_tensor_with_gaps_counts_as_not_written() -> None:
    whole = torch.zeros(4, 4)
    assert written_by([whole[1:3], whole[:, 1:]]) == [Span(whole.data_ptr() + 16, 32)]


class Device(torch.nn.Module):
    """A model in "device memory": its loader fuses, leaves rows of zeros behind the vocabulary, and keeps a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.qk = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.table = torch.arange(10.0)  # no parameter: no load writes it

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed.weight":
                self.embed[:6].copy_(weight)
                self.embed[6:].fill_(0)
            elif name == "norm.weight":
                self.norm.copy_(weight)
            else:
                (self.qk[:4] if name == "q.weight" else self.qk[4:]).copy_(weight)

    def memory(self) -> list[torch.Tensor]:
        return [self.embed.data, self.qk.data, self.norm.data, self.table]


class Llm:
    """vLLM's sleep: level 1 saves all, level 2 nothing, and the memory is another's meanwhile."""

    def __init__(self, device: Device) -> None:
        self.device, self.saved = device, list[torch.Tensor]()

    def sleep(self, level: int) -> None:
        self.saved = [tensor.clone() for tensor in self.device.memory()] if level == 1 else []
        for tensor in self.device.memory():
            tensor.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        if tags == ["weights"]:
            for tensor, saved in zip(self.device.memory() if self.saved else (), self.saved, strict=True):
                tensor.copy_(saved)

    def reset_prefix_cache(self, **_: bool) -> None:
        pass


class Engine(VllmEngine):
    """The engine without vLLM: what it does with weights in sleep."""

    def __init__(self) -> None:
        self.device = Device()
        self.llm: Any = Llm(self.device)
        self._on_cpu, self.parallel, self._fp8, self._shapes, self._checked, self.copies = False, False, None, SHAPES, {}, None
        self._summary: Any = type("Summary", (), {"nested": False})
        self._asleep, self._loads, self._running, self._own_bytes, self.version, self._ends, self._names = set(), 0, {}, 0, 0, {}, {}
        self._kept = KeptMemory(moved, pinned=False)
        self._shared: Any = type("Shared", (), {"give_back": lambda self: None})()

    def model(self) -> Device:
        return self.device

    def catch_up(self) -> None:
        pass

    def loaded(self, weights: Any) -> list[torch.Tensor]:
        self.wake()
        self.load_weights(weights)
        self._check_whole()
        return [tensor.clone() for tensor in self.device.memory()]


def moved(to: int, source: int, size: int) -> None:
    ctypes.memmove(to, source, size)


class Base(BaseWeights):
    """A base that is there without a folder."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        self._tensors = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
        self._folder, self._rounds, self._on_device = Path("here"), False, {}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def merged(base: Base, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name in CHANGED:
        module, (out, into) = name.removesuffix(".weight"), SHAPES[name]
        adapter |= {module + A: torch.randn(2, into, generator=generator), module + B: torch.randn(out, 2, generator=generator)}
    return base.with_adapter(adapter, 0.5, torch.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    blocks = [Span(tensor.data_ptr(), tensor.numel() * tensor.itemsize) for tensor in made.device.memory()]
    monkeypatch.setattr(kept_memory, "of_weights", lambda: blocks)
    return made


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_whole_weights_are_not_saved_but_for_what_no_load_writes(engine: Engine) -> None:
    engine.loaded(drawn(0))
    embed, table = 8 * 4 * 4, 10 * 4
    for seed in (1, 2, 3):
        assert engine.sleep_until_loaded() == embed + table  # zeros behind the vocabulary, and the table
        assert not engine.llm.saved
        assert same(engine.loaded(drawn(seed)), Engine().loaded(drawn(seed)))


def test_of_merged_weights_what_is_frozen_is_saved_once(engine: Engine) -> None:
    base, copied = Base(), list[int]()
    engine._kept = KeptMemory(lambda to, source, size: (copied.append(size), moved(to, source, size))[1], pinned=False)
    engine.loaded(merged(base, 0))
    for seed in (1, 2, 3):
        engine.sleep_until_loaded()
        assert same(engine.loaded(merged(base, seed)), Engine().loaded(merged(base, seed)))
    assert sorted(copied) == sorted((1 + 3) * [8 * 4 * 4, 4 * 4, 10 * 4])  # once there, and back each time


def test_any_order_of_loads_and_sleeps_leaves_the_memory_of_an_engine_that_saves_all(engine: Engine) -> None:
    plain, base, chance = Engine(), Base(), random.Random(0)
    for seed in range(200):
        sleeps = chance.choice(("sleep", "sleep_until_loaded", "none"))
        weights = (drawn if chance.random() < 0.4 else lambda seed: merged(base, seed))(seed)
        before = [tensor.clone() for tensor in engine.device.memory()]
        if sleeps != "none":
            getattr(engine, sleeps)()
            plain.sleep()
        if sleeps == "sleep" and chance.random() < 0.5:
            engine.wake()
            assert same(engine.device.memory(), before)
        (embed, *found, table), (its_embed, *expected, its_table) = engine.loaded(weights), plain.loaded(weights)
        assert same([found[0], embed[6:], table], [expected[0], its_embed[6:], its_table]), seed
        # A version of an adapter says nothing of what is frozen: an engine that saved it has that of the version before, or the base's.
        for own, its, name in ((embed[:6], its_embed[:6], "embed.weight"), (found[1], expected[1], "norm.weight")):
            assert torch.equal(own, its) or torch.equal(own, base[name]), (seed, name)


def test_an_engine_that_lacks_its_weights_says_so_rather_than_decode(engine: Engine) -> None:
    engine.loaded(drawn(0))
    engine.sleep_until_loaded()
    engine.wake()
    with pytest.raises(RuntimeError, match="slept until new weights are loaded, and is to decode without them; load weights first"):
        engine._check_whole()
    engine.sleep_until_loaded()
    engine.wake()
    with pytest.raises(RuntimeError, match="load weights first"):
        list(engine.prompt_log_probs({0: [1]}, 0))
    assert same(engine.loaded(drawn(1)), Engine().loaded(drawn(1)))


def test_where_parameters_lie_in_no_block_of_weights_all_is_saved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = kept_memory.of_weights()
    engine.loaded(drawn(0))
    monkeypatch.setattr(kept_memory, "of_weights", lambda: blocks[1:])
    engine.sleep_until_loaded()
    engine.wake()
    engine._check_whole()
    assert same(engine.device.memory(), Engine().loaded(drawn(0)))


def test_before_the_first_load_all_is_saved(engine: Engine) -> None:
    engine.device.load_weights(drawn(0).items())
    engine.sleep_until_loaded()
    assert engine.llm.saved
    engine.wake()
    assert same(engine.device.memory(), Engine().loaded(drawn(0)))
