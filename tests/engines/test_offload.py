"""Host memory for the moments of an optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph.engines.fsdp.optimizers import OffloadedMoments, pinned_like


def test_pinned_memory_is_one_piece_that_is_registered_once_as_large_as_it_must_be() -> None:
    tensors = [torch.randn(3, 5), torch.randn(70).bfloat16(), torch.zeros(())]
    with mock.patch("torch.cuda.cudart") as runtime, mock.patch("torch.cuda.check_error"):
        host = pinned_like(tensors)
    assert [(h.shape, h.dtype) for h in host] == [(t.shape, t.dtype) for t in tensors]
    [(address, size, _)] = [call.args for call in runtime.return_value.cudaHostRegister.call_args_list]
    assert all(address <= h.data_ptr() and h.data_ptr() + h.nbytes <= address + size for h in host)
    assert size == 64 + 192 + 64  # each begins at a line of the cache
    for h, t in zip(host, tensors, strict=True):
        h.copy_(t)
    assert all(torch.equal(h, t) for h, t in zip(host, tensors, strict=True))


def test_an_optimizer_without_moments_needs_no_memory() -> None:
    assert pinned_like([]) == []


class Later(TorchDispatchMode):
    """Copies of a stream: they are done once somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].fill_(float("nan"))  # what is read too early is no number
            self.copies.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> "Later":
        return self

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop(0)()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Later:
    """The stream on which moments come back, on a device that is this host."""
    later = Later()

    @contextmanager
    def on(stream: Later) -> Iterator[None]:
        with stream:
            yield

    for name, value in {"Stream": lambda: later, "stream": on, "current_stream": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("synchronize", "empty_cache", "cudart", "check_error"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    return later


def trained(between: Callable[[OffloadedMoments], None] = lambda moments: None) -> list[torch.Tensor]:
    """Take three steps, and do something `between` an update and the next; the parameters and moments."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(7))]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    moments = OffloadedMoments(optimizer)
    for _ in range(3):
        between(moments)
        loss = sum(((weight - 1) ** 2).sum() for weight in weights)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return [*(weight.detach() for weight in weights), *states]


def test_moments_come_back_while_passes_are_computed_and_a_step_waits_for_them(stream: Later) -> None:
    under_way = []

    def away_and_back(moments: OffloadedMoments) -> None:
        moments.take_off()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moments._away)
        moments.begin_back()
        under_way.append(len(stream.copies))

    assert all(torch.equal(a, b) for a, b in zip(trained(away_and_back), trained(), strict=True))
    assert under_way == [0, 4, 4]  # two moments of each of two parameters, once there are any
    assert not stream.copies


def test_moments_that_no_step_waited_for_leave_again_whole(stream: Later) -> None:
    def twice(moments: OffloadedMoments) -> None:
        moments.take_off()
        moments.begin_back()
        moments.begin_back()
        moments.take_off()
        assert moments.take_off() == 0
        moments.begin_back()

    assert all(torch.equal(a, b) for a, b in zip(trained(twice), trained(), strict=True))


def test_whoever_reads_the_moments_waits_for_them(stream: Later) -> None:
    def read(moments: OffloadedMoments) -> None:
        moments.take_off()
        moments.put_back()
        assert not stream.copies
        assert all(tensor.isfinite().all() for tensor in moments._moments())

    assert all(torch.equal(a, b) for a, b in zip(trained(read), trained(), strict=True))
