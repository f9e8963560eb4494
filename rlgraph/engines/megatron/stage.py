"""The part of a model that one rank computes: a stage of the pipeline, of whose matrices it has its share."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from rlgraph.batching.packing import MicroBatch
from rlgraph.engines.forward.collectives import gathered_rows
from rlgraph.engines.forward.head import Head, VocabularyShard
from rlgraph.engines.forward.policy_head import PolicyHead, Scored, head_scores
from rlgraph.engines.hf.backbone import LogitShape
from rlgraph.engines.megatron.modules import MegatronRanks, Packed, RMSNorm, layer_spec

# Megatron-Core on a CPU: its modules see a `torch` whose `cuda` is the host. Tests run there; the `torch` of everyone else stays as it is.
#
# Megatron-Core makes buffers on `torch.cuda.current_device()`, or on "cuda", and forks the random state of a GPU around dropout, which is 0
# here.

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


class PipelineStage(torch.nn.Module):
    """The layers of one stage, with the embedding in the first and the head in the last.

    `head` is the Hugging Face model without weights, whose rotation is used; `tied` embeddings are the head of a policy. `words` are those
    of this rank. `config` and `model_type` are what Megatron-Core's schedules ask for.
    """

    def __init__(
        self, head: Head, config: Any, ranks: MegatronRanks, words: VocabularyShard, *, tied: bool, fused: bool, device: torch.device
    ) -> None:
        super().__init__()
        from megatron.core.enums import ModelType
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
        from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

        spec = layer_spec(head_norms=config.qk_layernorm, experts=config.num_moe_experts is not None)
        prepare(device.type)
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self._ranks, self._fused, self._policy = ranks, fused, isinstance(head, PolicyHead)
        text = head.backbone.config.get_text_config()
        size, dtype = config.hidden_size, config.params_dtype
        if ranks.is_first:
            cut = {"reduce_scatter_embeddings": config.sequence_parallel, "config": config, "tp_group": ranks.tensor_group}
            self.embedding = VocabParallelEmbedding(words.most * ranks.tensor, size, init_method=_leave, **cut)
            if words.size < words.most:  # no token has the words that fill up the last rank's share
                self.embedding.weight = torch.nn.Parameter(self.embedding.weight.detach()[: words.size].clone())
        self._sequence_parallel: bool = config.sequence_parallel
        block = TransformerBlockSubmodules([spec] * (config.num_layers // ranks.pipeline), RMSNorm)
        self.decoder = TransformerBlock(config, block, pre_process=ranks.is_first, post_process=ranks.is_last)
        if ranks.is_last and self._policy:
            self.output = torch.nn.Linear(size, words.size, bias=False, device=device, dtype=dtype)
            if tied and ranks.is_first:
                self.output.weight = self.embedding.weight
        elif ranks.is_last:
            self.score = torch.nn.Linear(size, 1, bias=False, device=device, dtype=dtype)
        self._rotation = [head.backbone.rotary_emb.to(device)]  # in a list: it has no parameters that are this module's
        self._shape = LogitShape.of(text)
        self._words = words if ranks.tensor > 1 else None
        self.eval()
        self.decoder.training = config.recompute_granularity is not None  # of the block alone: it recomputes, and nothing drops out

    def set_input_tensor(self, given: list[Any]) -> None:
        """Take the states of the stage before; the schedule calls it."""
        self.decoder.set_input_tensor(given[0])

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Compute the states `[L, 1, H]` that the next stage takes, in the last stage those `[N, H]` from which targets are predicted."""
        assert micro_batch.starts is not None
        states = self._embed_tokens(micro_batch.tokens) if self._ranks.is_first else None
        like = torch.empty(0, device=micro_batch.tokens.device, dtype=self.config.params_dtype)
        cos, sin = self._rotation[0](like, micro_batch.positions)
        packed = Packed(micro_batch.starts, micro_batch.longest, cos[0], sin[0], micro_batch.group)
        states = self.decoder(hidden_states=states, attention_mask=None, packed_seq_params=packed)
        if not self._ranks.is_last:
            return states
        rows = states.transpose(0, 1)
        if self._ranks.tensor > 1:
            rows = gathered_rows(rows, self._ranks.tensor_group, summed=self._policy)  # else every rank has the whole head
        return rows[0, micro_batch.predicts]

    def _embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(tokens)
        return found if self._sequence_parallel else found.transpose(0, 1).contiguous()

    def scores(
        self, states: torch.Tensor, micro_batch: MicroBatch, *, temperature: float, entropy: bool = False, squares: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Score the targets of a micro-batch in the last stage, as a `Head` does."""
        if not self._policy:
            return (torch.mv(states.float(), self.score.weight.float()[0]),)
        scored = Scored(self._shape, temperature, entropy, squares, self._words)
        return head_scores(self.output, states, micro_batch.targets, scored, fused=self._fused)


def _leave(weight: torch.Tensor) -> None:
    """Initialise nothing: weights are read from a folder."""
