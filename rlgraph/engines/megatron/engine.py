"""Train with Megatron-Core: its layers and its pipeline schedule, our losses and our AdamW over float32 weights.

Each rank computes a stage of the pipeline, and has its share of the matrices of this stage.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rlgraph.algorithms.masks import Totals
from rlgraph.batching.packing import MicroBatch, pack_flat, plan_micro_batches
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.engines.api import Guard, Loss, check_weights
from rlgraph.engines.forward.collectives import VocabularyShard, gathered_rows
from rlgraph.engines.forward.head import Head, PolicyHead, Scored, check_lengths, head_scores, rows_of, shape_of, tensor_of, unpack_values
from rlgraph.engines.fsdp import distributed_checkpoint
from rlgraph.engines.fsdp.distributed_checkpoint import moment_key
from rlgraph.engines.fsdp.optimizers import OffloadedMoments, first_moments
from rlgraph.engines.fsdp.sharding import init_distributed, sum_metrics
from rlgraph.engines.hf.backbone import LogitShape
from rlgraph.engines.hf.folder_weights import folder_shapes, folder_shards
from rlgraph.engines.hf.model_files import rotary_limit
from rlgraph.engines.megatron.masters import SCORE, Box, BoxedTensor, Masters, PieceTable
from rlgraph.engines.megatron.modules import MegatronRanks, Packed, RMSNorm, check_config, layer_spec, transformer_config
from rlgraph.values.trainer import TrainerSettings

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
    def make_on_host(*given: Any, **named: Any) -> torch.Tensor:
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return make(*given, **named)

    return make_on_host


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


# Train with Megatron-Core: its layers and its pipeline schedule, our losses and our AdamW over float32 weights.

Done = tuple[torch.Tensor, torch.Tensor, None]  # a loss, a number of tokens that the schedule adds up and nobody reads, and no more


class MegatronEngine:
    """A `TrainEngine`: one of `world` ranks, with its stage of the layers, its share of their matrices, and its share of each batch.

    `head` is the Hugging Face model, without its weights, and what it gives: `PolicyHead(path)` log-probs, `ValueHead(path)` values;
    `settings` are those of a model, or `TrainerSettings(…)`. The ranks of a world of more than one call
    `torch.distributed.init_process_group` beforehand; how they share matrices, tokens, layers and experts, `MegatronRanks` says.
    `dtype` is what passes compute in; weights, gradients and moments are float32. `micro_batch_tokens` bounds the tokens of a rank in a
    pass, and a pipeline has several passes under way. A selective `recompute` computes the feed-forward block of a layer again.
    `on_progress(done, total)` is called after each pass.

    Raises GraphError for a model or an optimizer that it is not offered for, and ranks that cannot share the model.
    """

    def __init__(
        self,
        head: Head,
        settings: TrainerSettings,
        *,
        rank: int = 0,
        world: int = 1,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        text = head.backbone.config.get_text_config()
        cut = {how: getattr(settings, f"{how}_parallel") for how in ("tensor", "context", "pipeline", "expert")}
        check_config("MegatronEngine", text, **cut)
        self._made_group = init_distributed(rank, world)
        with quiet():
            self._ranks = ranks = MegatronRanks(rank, world, **cut)
        self._device = torch.device(device)
        self.micro_batch_tokens = settings.micro_batch_tokens
        optimizer = settings.optimizer
        self.optimizer_settings, self._steps = optimizer, 0
        self._added = False  # whether there are gradients of the next optimizer step
        self._head, self._on_progress = head, on_progress
        named = {name.removeprefix("model."): tuple(parameter.shape) for name, parameter in head.named_parameters()}
        tied = isinstance(head, PolicyHead) and "lm_head.weight" not in named
        self._shapes = named
        with quiet():
            config = transformer_config(text, ranks, dtype=dtype, device=device, recompute=settings.recompute)
            words = VocabularyShard.of(ranks.tensor_group, ranks.tensor_rank, ranks.tensor, text.vocab_size)
            self._table = PieceTable(config, ranks, "model." if isinstance(head, PolicyHead) else "", tied, words.first)
            self._stage = PipelineStage(head, config, ranks, words, tied=tied, fused=settings.fuses_head, device=self._device)
        self._masters = Masters(dict(self._stage.named_parameters()), self._table)
        self._parts = {} if head.folder is None else head.folder.parts()
        self._read()
        weights = list(self._masters.weights.values())
        given = optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay
        self._optimizer = torch.optim.AdamW([{"params": weights}], *given, fused=True)
        self._offloaded = OffloadedMoments(self._optimizer)
        self._shards: list[WeightShard] = []
        self._saver = distributed_checkpoint.Saver(rank, world)

    @torch.no_grad()
    def _read(self) -> None:
        """Read this rank's boxes of the weights from the folder."""
        for _, parameter, offsets, box in self._pieces(self._masters.weights):
            self._head.fill(parameter if parameter == SCORE else f"model.{parameter}", offsets, box)
        self._masters.publish()

    def _pieces(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, tuple[int, ...], torch.Tensor]]:
        """Yield the pieces of tensors of this rank by Megatron-Core's name: that name, the parameter in the folder, offsets and box."""
        for name, tensor in tensors.items():
            for piece in self._table.pieces(name, tensor.detach()):
                yield name, *piece

    def scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Give `[B, T]` float32 under the current weights: 0 where `response_mask` is false; the same on every rank."""
        return self._scores(batch, temperature, squares=False)[0]

    def scores_and_squares(self, batch: Columns, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Give a policy's `scores` and, alike, the sum of the squared probabilities of the vocabulary at each token."""
        log_probs, squares = self._scores(batch, temperature, squares=True)
        return log_probs, squares

    def base_scores(self, batch: Columns, *, temperature: float = 1.0) -> NoReturn:
        """Refuse: this trainer has no adapters."""
        raise NotImplementedError("trainer='megatron' trains no adapters")

    def top_scores(self, batch: Columns, top_k: int | None, *, temperature: float = 1.0) -> NoReturn:
        """Refuse: this trainer gives log-probs of one token at each position."""
        raise NotImplementedError("trainer='megatron' returns log-probs of one token at each position")

    def _scores(self, batch: Columns, temperature: float, *, squares: bool) -> torch.Tensor:
        result = torch.zeros(1 + squares, *shape_of(batch), device=self._device)

        def score(micro_batch: MicroBatch, states: torch.Tensor) -> Done:
            found = self._stage.scores(states, micro_batch, temperature=temperature, squares=squares)
            for column, own in zip(result, found if self._ranks.speaks else (), strict=False):
                column[micro_batch.rows[micro_batch.row], micro_batch.column] = own
            return self._nothing, self._no_tokens, None

        with torch.no_grad():
            self._run(batch, score, trains=False)
        if self._ranks.world > 1:
            dist.all_reduce(result)
        return result.cpu()

    def update(self, batch: Columns, loss: Loss, *, temperature: float = 1.0, guard: Guard | None = None) -> dict[str, float]:
        """Take one optimizer step over the batch, sampled at `temperature`, unless `guard`, which sees the metrics, says no.

        The metrics are those of the trainer "fsdp". A batch without a token to learn from takes no step.
        """
        totals = Totals.of(tensor_of(batch, "response_mask"))
        metrics = self.add_gradients(batch, loss, totals, temperature=temperature)
        return self.apply_gradients(metrics, learns=totals.tokens > 0, guard=guard)

    def add_gradients(self, batch: Columns, loss: Loss, totals: Totals, *, temperature: float = 1.0) -> dict[str, float]:
        """Add the gradients of a batch, or of a part of it, for the next optimizer step; see `StreamedTrainEngine`."""
        width = shape_of(batch)[1]
        found: list[dict[str, float]] = []
        if not self._added:
            self._masters.begin()
        self._added = True

        def learn(micro_batch: MicroBatch, states: torch.Tensor) -> Done:
            scores = self._stage.scores(states, micro_batch, temperature=temperature, entropy=loss.needs_entropy)
            if len(micro_batch.rows) == 0:
                return scores[0].sum() * 0, self._no_tokens, None  # the other ranks of the pass compute it too
            padded = tuple(unpack_values(score, micro_batch, width) for score in scores)
            value, metrics = self._head.loss(loss, padded, rows_of(batch, micro_batch.rows, self._device), totals)
            if self._ranks.speaks and self._ranks.context_rank == 0:  # ranks of a row compute the same loss
                found.append({self._head.loss_name: value.item()} | metrics)
            return value, self._no_tokens, None

        self._run(batch, learn, trains=True)
        return {self._head.loss_name: 0.0} | sum_metrics(found, self._ranks.world, self._device)

    @property
    def _nothing(self) -> torch.Tensor:
        return torch.zeros((), device=self._device)

    @property
    def _no_tokens(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int, device=self._device)

    def _run(self, batch: Columns, work: Callable[[MicroBatch, torch.Tensor], Done], *, trains: bool) -> None:
        """Run the passes of this rank by Megatron-Core's schedule; the ranks with the head do the `work`."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        ranks = self._ranks
        check_lengths(batch, rotary_limit(self._head.backbone.config.get_text_config()))
        most = self.micro_batch_tokens * ranks.context  # of a pass, which these ranks share
        passes = plan_micro_batches(batch, ranks.data, most, flat=True, shared=False)[ranks.data_rank]

        def micro_batches() -> Iterator[MicroBatch]:
            for done, sequences in enumerate(passes):
                self._on_progress(done, len(passes))
                row = pack_flat(batch, sequences, multiple=ranks.tensor * ranks.context)
                own = row if ranks.context == 1 else row.shard(ranks.context_group, ranks.context_rank, ranks.context)
                yield own.to(self._device)

        def forward(given: Iterator[MicroBatch], stage: PipelineStage) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            micro_batch = next(given)
            return stage(micro_batch), partial(work, micro_batch)

        if passes:
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=micro_batches(),
                model=[self._stage],
                num_microbatches=len(passes),
                seq_length=1,  # each pass tells its own
                micro_batch_size=1,
                forward_only=not trains,
            )
        self._on_progress(len(passes), len(passes))

    def apply_gradients(
        self, metrics: Mapping[str, float], *, learns: bool, guard: Guard | None = None, divisor: int = 1
    ) -> dict[str, float]:
        """Take the optimizer step with the gradients that were added; see `StreamedTrainEngine`."""
        self._added = False
        self._masters.add_up(divisor)
        norm = self._masters.clip(self.optimizer_settings.grad_clip)
        lr = self.optimizer_settings.lr_at(self._steps)
        metrics = {**metrics, f"{self._head.prefix}/grad_norm": norm, f"{self._head.prefix}/lr": lr}
        if not learns or (guard is not None and not guard(metrics)):
            return metrics
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._masters.publish()
        self._steps += 1
        return metrics

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's boxes of all parameters, live, in float32, by their names in the folder; see `TrainEngine`."""
        if not self._shards:
            own = [
                WeightShard(parameter, self._shapes[parameter], offsets, box, self._table.replica(name))
                for name, parameter, offsets, box in self._pieces(self._masters.weights)
            ]
            self._shards = list(folder_shards(own, self._parts))
        return iter(self._shards)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take other weights: full tensors by their names in the folder, of which this rank keeps its own boxes.

        Raises DataError unless they are exactly the model's parameters.
        """
        check_weights(weights, folder_shapes(self._shapes, self._parts))
        for shard in self.weight_shards():
            shard.tensor.copy_(shard.view_of(weights[shard.name]))
        self._masters.publish()

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, moments and the count of optimizer steps, live, by the Hugging Face names that the trainer "fsdp" has too."""
        self._offloaded.put_back()
        weights, moments = self._masters.weights, {}
        for name, weight in weights.items():
            moments[name] = self._optimizer.state[weight]
            if not moments[name]:
                moments[name].update(first_moments(self._optimizer, weight))
        found: dict[str, torch.Tensor] = {"optimizer_steps": torch.tensor(self._steps)}
        boxes: dict[tuple[str, str], list[Box]] = {}
        for name, parameter, offsets, box in self._pieces(weights):
            boxes.setdefault((f"{distributed_checkpoint.WEIGHTS}{parameter}", parameter), []).append((offsets, box))
            found[moment_key(parameter, "step")] = moments[name]["step"]
        for moment in ("exp_avg", "exp_avg_sq"):
            for _, parameter, offsets, box in self._pieces({name: held[moment] for name, held in moments.items()}):
                boxes.setdefault((moment_key(parameter, moment), parameter), []).append((offsets, box))
        return found | {key: BoxedTensor(self._shapes[parameter], own) for (key, parameter), own in boxes.items()}

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        """Copy the state to the host, and give the function that writes it as shards of torch.distributed.checkpoint."""
        return self._saver.save(self.state(), folder, deadline_s)

    def load(self, folder: Path) -> None:
        """Go on from what any number of ranks of this trainer or of "fsdp" saved. Raises CheckpointError as that does."""
        state = self.state()
        distributed_checkpoint.read(folder, state)
        self._steps = int(state["optimizer_steps"])
        self._masters.publish()

    def sleep(self) -> int | None:
        """Give back the device memory of the moments, which go to host memory, and of what no tensor is in."""
        return None if self._device.type != "cuda" else self._offloaded.take_off()

    def wake(self) -> None:
        """Be ready to compute again; the moments come back while passes are computed."""
        self._offloaded.begin_back()

    def close(self) -> None:
        """Free the model, Megatron-Core's groups, and the process group if the engine made it."""
        del self._optimizer, self._stage, self._masters, self._shards, self._head
        self._ranks.close()
        if self._made_group:
            dist.destroy_process_group()
