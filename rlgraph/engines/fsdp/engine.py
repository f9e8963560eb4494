"""Train with PyTorch: FSDP2 over a Hugging Face model, float32 master weights, one optimizer step an update."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.algorithms.distillation import CHOSEN
from rlgraph.algorithms.masks import Totals
from rlgraph.batching.packing import MicroBatch, pack, pack_flat, plan_micro_batches
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.engines.api import Guard, Loss, check_weights, chosen_at
from rlgraph.engines.forward import experts, packed_attention
from rlgraph.engines.forward.experts import Routing, routers_of
from rlgraph.engines.forward.head import ChosenTokens, Head, check_lengths, rows_of, shape_of, tensor_of, unpack_values
from rlgraph.engines.forward.ring import RingPass
from rlgraph.engines.fsdp import distributed_checkpoint
from rlgraph.engines.fsdp.optimizers import OffloadedMoments, build_optimizer, clip_gradients
from rlgraph.engines.fsdp.parallel import Places, check_experts, check_parallel, share_experts, share_matrices, sum_gradients
from rlgraph.engines.fsdp.recompute import prepare_layers
from rlgraph.engines.fsdp.sharding import (
    Ranks,
    init_distributed,
    load_shards,
    local,
    own_box,
    set_reshard,
    shard,
    storage_of,
    sum_metrics,
    whole_shape,
)
from rlgraph.engines.hf import backbone
from rlgraph.engines.hf.folder_weights import folder_shapes, folder_shards
from rlgraph.engines.hf.model_files import rotary_limit
from rlgraph.engines.lora import InitialWeights, LoraLinear, SharedBase, attach
from rlgraph.engines.registry import exactness
from rlgraph.errors import GraphError
from rlgraph.plan.estimates import ring_ranks
from rlgraph.values.lora import LoRA
from rlgraph.values.trainer import TrainerSettings


class FsdpEngine:
    """A `TrainEngine`: one of `world` ranks, each with its rows of every parameter and its share of each batch.

    `head` is the model and what it gives: `PolicyHead(path)` log-probs, `ValueHead(path)` values; `settings` are those of a model, or
    `TrainerSettings(…)`. The ranks of a world of more than one call `torch.distributed.init_process_group` beforehand (gloo on a CPU); for
    a world of one the engine makes the group itself. `dtype` is what passes compute in; weights, gradients and moments are float32.
    `flat` packs sequences without padding (None: on a GPU, or to recompute). Responses to one prompt share one copy of it, unless `shared`
    is False, or the settings are exact. Neighbours share the matrices of the layers, and groups of them the tokens of a pass, which is
    packed flat: see `Ranks`. Of these `ring` pass keys round, and the others exchange tokens for heads; None: as many as heads leave over.
    With an adapter the model itself is frozen, in `dtype`; weights, shards and state are then those of the adapter alone; a `shared_base`
    has frozen weights that other models hold as well. `on_progress(done, total)` is called after each micro-batch of an update or of
    scores.

    Raises GraphError for ranks that cannot share the model.
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
        flat: bool | None = None,
        shared: bool = True,
        ring: int | None = None,
        shared_base: SharedBase | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        tensor, context, exact, recompute = settings.tensor_parallel, settings.context_parallel, settings.exact, settings.recompute
        tells = not settings.compiled and tensor * context == 1  # layers tell which experts they chose
        self._routing = Routing(routers_of(head.model) if tells else [], settings.load_balance, replay=settings.router_replay)
        if settings.train_vision:
            head.train_vision()
        self._adapters = [] if settings.adapter is None else _attach_adapter(head, settings.adapter, dtype, world)
        self._made_group = init_distributed(rank, world)
        self._device, self._dtype = torch.device(device), dtype
        ring = _ring(head, tensor, context) if ring is None else ring
        self._ranks = Ranks(device, rank, world, tensor=tensor, context=context, ring=ring, expert=settings.expert_parallel)
        self.micro_batch_tokens = settings.micro_batch_tokens
        self.optimizer_settings, self._steps = settings.optimizer, 0
        self._head = head if head.folder is not None else head.to(self._device)
        self._most = rotary_limit(head.backbone.config.get_text_config())
        self._flat = exact or (self._device.type == "cuda" or bool(recompute) or self._ranks.ranks_of_a_pass > 1 if flat is None else flat)
        self.shared = shared and not exact  # the engine attends to a prompt before each response by itself
        self._check_sharing(head)
        self._exchanged = self._install_operations(head, compiled=settings.compiled, exact=exact)
        prepare_layers(head.layers, recompute=recompute, compiled=settings.compiled, tensor_parallel=tensor)
        if head.vision is not None:  # whose layers are not compiled: each of its images has another size
            prepare_layers(backbone.vision_layers(head.vision), recompute=recompute, compiled=False)
        self._alike: Places = () if self._ranks.matrices is None else share_matrices(head, self._ranks.matrices)
        self._experts = [] if self._ranks.experts is None else self._shared_experts(head, self._ranks.experts, dtype)
        self._units = [*self._experts, *shard(head, head.layers, self._ranks.sharded, dtype, head.backbone.get_input_embeddings())]
        own = {} if head.folder is None else head.folder.parts()
        self._parts = {**own, **({} if head.vision_folder is None else backbone.vision_parts(head.vision_folder))}
        if head.folder is not None:
            load_shards(head, self._device, shared_base)
        for projection in self._adapters:
            projection.finish_loading()
        self._moments_stay = settings.host_moments or settings.moments_stay
        self._optimizer = build_optimizer(settings.optimizer, head, host_moments=settings.host_moments)
        self._offloaded = OffloadedMoments(self._optimizer)
        self._on_progress = on_progress
        self._shards: list[WeightShard] = []  # of this rank, and below what they are of: FSDP moves a shard that it pads, in its first pass
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._saver = distributed_checkpoint.Saver(rank, world)

    def _install_operations(self, head: Head, *, compiled: bool, exact: bool) -> list[Any]:
        """Give the model what computes its attention, norms and experts, and return the linear maps that `forget` when weights change."""
        packed_attention.install(head.model, packed_attention.FLAT if self._flat else packed_attention.PADDED)
        if self._device.type == "cuda" and not exact:
            backbone.install_fused_norms(head.model)
        if not compiled and self._ranks.tensor == 1 and self._ranks.experts is None:
            experts.install(head.model)
        return exactness().exchange(head, self._device.type) if exact else []

    def _check_sharing(self, head: Head) -> None:
        if self._ranks.ranks_of_a_pass == 1:
            return
        if not self._flat:
            raise GraphError("FsdpEngine(flat=False): ranks share passes that are packed flat; leave out flat")
        config = head.backbone.config.get_text_config()
        check_parallel("FsdpEngine", config, tensor=self._ranks.tensor, context=self._ranks.context, ring=self._ranks.ring)

    def _shared_experts(self, head: Head, mesh: DeviceMesh, dtype: torch.dtype) -> list[Any]:
        check_experts("FsdpEngine", head.backbone.config.get_text_config(), mesh["ep"].size())
        return share_experts(head.model, mesh, dtype)

    def scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Give `[B, T]` float32 under the current weights: 0 where `response_mask` is false; the same on every rank."""
        return self._scores(batch, temperature, squares=False)[0]

    def base_scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Give `scores` of the model without its adapter."""
        try:
            self._switch(on=False)
            return self.scores(batch, temperature=temperature)
        finally:
            self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        for projection in self._adapters:
            projection.on = on

    def scores_and_squares(self, batch: Columns, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Give a policy's `scores` and, alike, the sum of the squared probabilities of the vocabulary at each token."""
        log_probs, squares = self._scores(batch, temperature, squares=True)
        return log_probs, squares

    def top_scores(self, batch: Columns, top_k: int | None, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give a policy's `scores`, and the `top_k` most probable tokens at each: ids and log-probs `[B, T, K]`; None is for all tokens."""
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for micro_batch in self._passes(batch):
                own = self._head(micro_batch, temperature=temperature, tokens=ChosenTokens(top_k=top_k))
                found = found or [torch.zeros(*shape_of(batch), *score.shape[1:], dtype=score.dtype, device=self._device) for score in own]
                for column, scores in zip(found, own, strict=True):
                    column[micro_batch.rows[micro_batch.row], micro_batch.column] = scores
        for unit in self._units:
            unit.reshard()
        for column in found if self._ranks.sharded.size() > 1 else ():
            dist.all_reduce(column, group=self._ranks.sharded.get_group())
        log_probs, ids, most = (column.cpu() for column in found)
        return log_probs, ids.int(), most

    def _scores(self, batch: Columns, temperature: float, *, squares: bool) -> torch.Tensor:
        result = torch.zeros(1 + squares, *shape_of(batch), device=self._device)
        with torch.no_grad():
            for micro_batch in self._passes(batch):
                for column, scores in zip(result, self._head(micro_batch, temperature=temperature, squares=squares), strict=True):
                    column[micro_batch.rows[micro_batch.row], micro_batch.column] = scores
        for unit in self._units:  # else the next pass would compute with these, whatever happens to the weights in between
            unit.reshard()
        if self._ranks.sharded.size() > 1:
            dist.all_reduce(result, group=self._ranks.sharded.get_group())
        return result.cpu()

    def update(self, batch: Columns, loss: Loss, *, temperature: float = 1.0, guard: Guard | None = None) -> dict[str, float]:
        """Take one optimizer step over the batch, sampled at `temperature`, unless `guard`, which sees the metrics, says no.

        A batch without a token to learn from takes no step either, and no warm-up goes on. Metrics of a policy: `actor/pg_loss` (all of
        the loss, unless the loss names a part of it so), `actor/grad_norm` before clipping, `actor/lr` and those of the loss; of a
        critic the same with `critic/vf_loss`.
        """
        totals = Totals.of(tensor_of(batch, "response_mask"))
        metrics = self.add_gradients(batch, loss, totals, temperature=temperature)
        return self.apply_gradients(metrics, learns=totals.tokens > 0, guard=guard)

    def add_gradients(self, batch: Columns, loss: Loss, totals: Totals, *, temperature: float = 1.0) -> dict[str, float]:
        """Add the gradients of a batch, or of a part of it, for the next optimizer step; see `StreamedTrainEngine`."""
        width = shape_of(batch)[1]
        found: list[dict[str, float]] = []
        at = chosen_at(loss)
        for micro_batch in self._passes(batch):
            rows = rows_of(batch, micro_batch.rows, self._device)
            tokens = None if at is None else ChosenTokens(tensor_of(rows, at)[micro_batch.row, micro_batch.column])
            with self._routing:
                scores = self._head(micro_batch, temperature=temperature, entropy=loss.needs_entropy, tokens=tokens)
            assert micro_batch.repeats is not None
            self._routing.count(micro_batch.repeats)
            if len(micro_batch.rows) == 0:
                (scores[0].sum() * 0).backward()  # collectives need every rank
                continue
            whole = tuple(unpack_values(score, micro_batch, width) for score in scores)
            if at is not None:
                rows, whole = {**rows, CHOSEN: whole[2]}, whole[: 1 + loss.needs_entropy]
            value, metrics = self._head.loss(loss, whole, rows, totals)
            balance, more = self._routing.loss(micro_batch.repeats, len(micro_batch.targets) / max(totals.tokens, 1))
            found.append({self._head.loss_name: value.item()} | metrics | more)  # before the backward pass, which this would wait for
            (value if balance is None else value + balance).backward()
        return {self._head.loss_name: 0.0} | sum_metrics(found, self._ranks.data, self._device, self._ranks.data_group)

    def _add_up(self, counts: torch.Tensor) -> None:
        if self._ranks.sharded.size() > 1:
            dist.all_reduce(counts, group=self._ranks.sharded.get_group())

    def apply_gradients(
        self, metrics: Mapping[str, float], *, learns: bool, guard: Guard | None = None, divisor: int = 1
    ) -> dict[str, float]:
        """Take the optimizer step with the gradients that were added; see `StreamedTrainEngine`."""
        metrics = {**metrics, **self._routing.metrics(self._add_up)}
        if self._ranks.matrices is not None:
            sum_gradients(self._alike, self._ranks.matrices)
        if divisor != 1:
            grads = [local(parameter.grad) for parameter in self._head.parameters() if parameter.grad is not None]
            torch._foreach_div_(grads, divisor)
        norm = clip_gradients(self._head.parameters(), self.optimizer_settings.grad_clip)
        lr = self.optimizer_settings.lr_at(self._steps)
        metrics = metrics | {f"{self._head.prefix}/grad_norm": norm, f"{self._head.prefix}/lr": lr}
        if not learns or (guard is not None and not guard(metrics)):
            self._optimizer.zero_grad()
            return metrics
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        self._forget()
        return metrics

    def _forget(self) -> None:
        for projection in self._exchanged:
            projection.forget()

    def _passes(self, batch: Columns) -> Iterator[MicroBatch]:
        ranks = self._ranks
        check_lengths(batch, self._most)
        most = self.micro_batch_tokens * ranks.context  # of a pass, which these ranks share
        passes = plan_micro_batches(batch, ranks.data, most, flat=self._flat, shared=self.shared)[ranks.data_rank]
        for done, sequences in enumerate(passes):
            self._on_progress(done, len(passes))
            multiple = ranks.ranks_of_a_pass * (2 if ranks.ring > 1 else 1)  # a ring has two pieces for each place
            packed = pack_flat(batch, sequences, multiple=multiple) if self._flat else pack(batch, sequences)
            if packed.images is not None:
                self._head.load_tower(self._device, self._dtype)
            own = (packed if ranks.context == 1 else self._shard(packed)).to(self._device)
            self._routing.begin(own.routes if self._routing.replay else None)
            if ranks.sharded.size() == 1:
                set_reshard(self._units, more=done + 1 < len(passes))
            elif ranks.experts is not None and ranks.experts["fsdp"].size() == 1:
                set_reshard(self._experts, more=done + 1 < len(passes), casts=False)
            yield own
        self._on_progress(len(passes), len(passes))

    def _shard(self, row: MicroBatch) -> MicroBatch:
        ranks = self._ranks
        own = row.shard(ranks.context_group, ranks.context_rank, ranks.context, ring=ranks.ring)
        return own if ranks.ring == 1 else replace(own, ring=RingPass(row, ranks.ring_group, ranks.heads_group, self._device))

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by the names that the model's folder has."""
        return {n.removeprefix("model."): parameter for n, parameter in self._head.named_parameters() if parameter.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's part of every parameter that is trained, live and in float32.

        Ranks that share no matrices have rows, split as by `torch.chunk`.
        """
        return {name: local(parameter.detach()) for name, parameter in self.trained_parameters().items()}

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's box of every parameter that is trained, live, in float32, by its name in the folder; see `TrainEngine`."""
        if not self._shards or any(storage_of(parameter) is not held for parameter, held in self._held):
            named = self.trained_parameters()  # to find the shards takes longer than to copy those of a small model, so it is done once
            self._held = [(parameter, storage_of(parameter)) for parameter in named.values()]
            self._shards = list(folder_shards(map(own_box, named, named.values()), self._parts))
        return iter(self._shards)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take other weights: full tensors by their names in the folder, of which this rank keeps its own boxes.

        Raises DataError unless they are exactly the model's parameters.
        """
        shapes = {name: whole_shape(parameter) for name, parameter in self.trained_parameters().items()}
        check_weights(weights, folder_shapes(shapes, self._parts))
        for box in self.weight_shards():
            box.tensor.copy_(box.view_of(weights[box.name]))
        self._forget()

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, moments and the count of optimizer steps by name: the live tensors, DTensors where each rank has rows of its own."""
        self._offloaded.put_back()
        return distributed_checkpoint.training_state(self.trained_parameters().items(), self._optimizer) | {
            "optimizer_steps": torch.tensor(self._steps)
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a `state`; tensors that are this engine's own have been filled already."""
        own = self.state()
        for name, tensor in own.items():
            if local(tensor).data_ptr() != local(state[name]).data_ptr():
                local(tensor).copy_(local(state[name]))
        self._steps = int(state["optimizer_steps"])
        self._forget()

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        """Copy the state to the host, and give the function that writes it as shards of torch.distributed.checkpoint."""
        return self._saver.save(self.state(), folder, deadline_s)

    def load(self, folder: Path) -> None:
        """Go on from what any number of ranks saved. Raises CheckpointError where a tensor is missing or has another shape."""
        state = self.state()
        distributed_checkpoint.read(folder, state)
        self.load_state(state)

    def sleep(self) -> int | None:
        """Give back the device memory of the moments, which go to host memory unless they stay, and of what no tensor is in."""
        if self._device.type != "cuda":
            return None
        if self._moments_stay:  # on the host, or on the device for good
            torch.cuda.empty_cache()
            return 0
        return self._offloaded.take_off()

    def wake(self) -> None:
        """Be ready to compute again; the moments come back while passes are computed."""
        self._offloaded.begin_back()

    def close(self) -> None:
        """Free the model, and the process group if the engine made it."""
        self._optimizer.zero_grad()
        del self._optimizer, self._head, self._units, self._experts, self._shards, self._held
        if self._made_group:
            dist.destroy_process_group()


def _ring(head: Head, tensor: int, context: int) -> int:
    """Count the ranks of a ring for the heads of a model; 1 where no row is shared, whatever the model."""
    config = head.backbone.config.get_text_config()
    return 1 if context == 1 else ring_ranks(config.num_attention_heads, tensor=tensor, context=context)


def _attach_adapter(head: Head, adapter: LoRA, dtype: torch.dtype, world: int) -> list[LoraLinear]:
    if adapter.base is not None and world > 1:
        raise GraphError(f"FsdpEngine(world={world}): a base in '{adapter.base}' is whole on one rank; leave out base")
    head.begins = InitialWeights(adapter)
    return attach(head, [part for part in (head.layers, head.vision) if part is not None], adapter, dtype, head.unadapted_modules)
