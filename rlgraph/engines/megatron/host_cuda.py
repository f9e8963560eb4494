"""Megatron-Core on a CPU: its modules see a `torch` whose `cuda` is the host. Tests run there; the `torch` of everyone else stays as it is.

Megatron-Core makes buffers on `torch.cuda.current_device()`, or on "cuda", and forks the random state of a GPU around dropout, which is 0
here.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

MAKERS = ("empty", "zeros", "ones", "full", "tensor", "arange", "zeros_like", "empty_like", "ones_like")


class NoRandomness:
    """A tracker of random states that has none to fork."""

    is_inference_rng_tracker = False

    def is_initialized(self) -> bool:
        return True

    @contextlib.contextmanager
    def fork(self, name: str | None = None) -> Iterator[None]:
        """Do nothing around what draws nothing."""
        yield

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """Take back what `get_states` gave: nothing."""


class _Stream:
    """A stream or an event of a device that has neither."""

    def __getattr__(self, name: str) -> Callable[..., "_Stream"]:
        return lambda *given, **named: self


class _Cuda(ModuleType):
    """What Megatron-Core calls of `torch.cuda`."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.Stream = self.Event = lambda *given, **named: _Stream()
        self.stream = lambda stream: contextlib.nullcontext()
        self.current_stream = lambda *given: _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> str:
        return "cpu"

    def synchronize(self, *given: Any) -> None:
        """Do nothing: a CPU has computed what it was asked to."""


class _Torch(ModuleType):
    """`torch`, with tensors on the host where "cuda" is asked for."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_host(found) if name in MAKERS else found


def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*given: Any, **named: Any) -> torch.Tensor:
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return make(*given, **named)

    return made


HOST = _Torch()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of Megatron-Core that Transformer Engine and Apex are not installed: no module is used that needs them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _nothing(*states: Any) -> None:
    """Set no random states: none were taken."""


def _numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron-Core makes of counts on a GPU, of counts on the host."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def prepare(device: str) -> None:
    """Prepare the imported modules of Megatron-Core for a device: no random states, and on a CPU its own `torch`."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    import_module("megatron.core.transformer.multi_token_prediction")  # or the first pass does, and warns of what is not installed
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoRandomness(), True
    random._get_all_rng_states, random._set_all_rng_states = tuple, _nothing  # a layer that is computed again draws nothing either
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 asks for it where it was not imported: without Transformer Engine
    if device != "cpu":
        return
    token_dispatcher.maybe_move_tensor_to_cpu = _numbers
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            vars(module)["torch"] = HOST
