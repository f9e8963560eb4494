"""Host memory for the moments of an optimizer."""

from unittest import mock

import torch

from rlgraph.engines.fsdp.offload import pinned_like


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
