"""Train with PyTorch: FSDP2 over a Hugging Face model, float32 master weights, one optimizer step an update."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlgraph.algorithms.aggregation import Totals
from rlgraph.columns import Column, Columns
from rlgraph.engines.adamw import AdamW
from rlgraph.engines.base import PolicyLoss, check_count
from rlgraph.engines.log_probs import sum_pi_squared, token_scores
from rlgraph.engines.packing import MicroBatch, pack, plan_micro_batches, response_lengths
from rlgraph.engines.pretrained import check_model
from rlgraph.errors import DataError, GraphError

SHORT_SEQUENCE = 128  # tokens; the unfused kernel is 2.3 times as fast at 54 and its memory grows with the square


class FsdpEngine:
    """A `TrainEngine`: one of `world` ranks, each with its rows of every parameter and its part of each batch.

    The ranks of a world of more than one call `torch.distributed.init_process_group` beforehand (gloo on a CPU); for a
    world of one the engine makes the group itself. `dtype` is what passes compute in; weights, gradients and moments are
    float32. `micro_batch_tokens` bounds the padded tokens of one pass, and so its memory; the step does not depend on it.
    `temperature` is that of the sampling, by which log-probs are those of the distribution that was sampled from.

    Raises DataError for a folder that holds no such model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        optimizer: AdamW,
        rank: int = 0,
        world: int = 1,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        micro_batch_tokens: int = 8192,
        temperature: float = 1.0,
        threads: int | None = None,
    ) -> None:
        check_count("FsdpEngine", "micro_batch_tokens", micro_batch_tokens, 1)
        if threads is not None:
            torch.set_num_threads(threads)
        self._made_group = _join(rank, world)
        self._rank, self._world, self._device = rank, world, torch.device(device)
        self._temperature, self._micro_batch_tokens = temperature, micro_batch_tokens
        self._settings, self._steps = optimizer, 0
        self._policy = _Policy(_load(path))
        self._policy.to(self._device)
        self._units = _shard(self._policy, DeviceMesh(device, torch.arange(world)), dtype)
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay, fused=True
        )

    def log_probs(self, batch: Columns) -> torch.Tensor:
        """Return `[B, T]` float32 under the current weights: 0 where `response_mask` is false; the same on every rank."""
        return self._scores(batch, squares=False)[0]

    def log_probs_and_squares(self, batch: Columns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `log_probs` does and, alike, the sum of the squared probabilities of the vocabulary at each token."""
        log_probs, squares = self._scores(batch, squares=True)
        return log_probs, squares

    def _scores(self, batch: Columns, *, squares: bool) -> torch.Tensor:
        result = torch.zeros(1 + squares, *_shape(batch), device=self._device)
        with torch.no_grad():
            for part in self._passes(batch):
                scores, sums = self._policy(part, self._temperature, squares=squares)
                result[0, part.rows[part.row], part.column] = scores
                if squares:
                    result[1, part.rows[part.row], part.column] = sums
        for unit in self._units:  # else the next pass would compute with these, whatever happens to the weights in between
            unit.reshard()
        if self._world > 1:
            dist.all_reduce(result)
        return result.cpu()

    def update(self, batch: Columns, loss: PolicyLoss) -> dict[str, float]:
        """Take one optimizer step over the batch.

        Metrics: `actor/pg_loss` (all of the loss, unless the loss names a part of it so), `actor/grad_norm` before
        clipping, `actor/lr`, `perf/total_num_tokens` and those of the loss.
        """
        rows, width = _shape(batch)
        totals = Totals(tokens=int(_tensor(batch, "response_mask").sum()), rows=rows)
        parts: list[dict[str, float]] = []
        for part in self._passes(batch):
            scores, entropies = self._policy(part, self._temperature, entropy=loss.needs_entropy)
            if len(part.rows) == 0:
                (scores.sum() * 0).backward()  # collectives need every rank
                continue
            entropy = None if entropies is None else _unpack(entropies, part, width)
            value, metrics = loss(_unpack(scores, part, width), _rows(batch, part.rows, self._device), totals, entropy)
            value.backward()
            parts.append({"actor/pg_loss": value.item()} | metrics)
        return _summed(parts, self._world) | self._step() | {"perf/total_num_tokens": float(_count_tokens(batch))}

    def _step(self) -> dict[str, float]:
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._settings.grad_clip)
        lr = self._settings.lr_at(self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return {"actor/grad_norm": float(_full(norm)), "actor/lr": lr}

    def _passes(self, batch: Columns) -> Iterator[MicroBatch]:
        for sequences in plan_micro_batches(batch, self._world, self._micro_batch_tokens)[self._rank]:
            yield pack(batch, sequences).to(self._device)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's rows of every parameter, live: float32, split along dim 0 as by `torch.chunk`."""
        return {name: _local(p.detach()) for name, p in self._policy.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        """Return this rank's weights, moments and step count; the tensors are the live ones, so write before you go on."""
        names = [name for name, _ in self._policy.model.named_parameters()]
        moments = self._optimizer.state_dict()["state"]
        return {
            "rank": self._rank,
            "world": self._world,
            "steps": self._steps,
            "weights": self.weights(),
            "moments": {names[i]: {key: _local(value) for key, value in moment.items()} for i, moment in moments.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state` of this rank. Raises DataError for one of another rank or world."""
        if (state["rank"], state["world"]) != (self._rank, self._world):
            raise DataError(
                f"load_state: the state is of rank {state['rank']} of {state['world']}, this is rank {self._rank} of {self._world}; "
                "go on with as many trainer ranks as before"
            )
        self._steps = state["steps"]
        for name, parameter in self._policy.model.named_parameters():
            _local(parameter.detach()).copy_(state["weights"][name])
            if name in state["moments"]:
                self._optimizer.state[parameter] = {k: _like(v, parameter, k) for k, v in state["moments"][name].items()}

    def close(self) -> None:
        """Free the model, and the process group if the engine made it."""
        self._optimizer.zero_grad()
        del self._optimizer, self._policy, self._units
        if self._made_group:
            dist.destroy_process_group()


class _Policy(torch.nn.Module):
    """The whole pass as one module, so that FSDP gathers embedding, last norm and head around it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, part: MicroBatch, temperature: float, *, entropy: bool = False, squares: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs `[N]` of the targets and, if asked for, entropies `[N]` or sums of squared probabilities `[N]`."""
        with _attention(part.tokens):
            hidden = self.model.base_model(
                input_ids=part.tokens, attention_mask=part.mask, position_ids=part.positions, use_cache=False
            ).last_hidden_state
        logits = self.model.get_output_embeddings()(hidden.flatten(0, 1)[part.predicts])
        log_probs, entropies = token_scores(logits, part.targets, temperature=temperature, entropy=entropy)
        return log_probs, sum_pi_squared(logits, temperature=temperature) if squares else entropies


def _attention(tokens: torch.Tensor) -> AbstractContextManager[None]:
    """Return the attention kernel for an input: on a CPU the backward pass of the fused one is slow for short sequences."""
    short = tokens.device.type == "cpu" and tokens.shape[1] <= SHORT_SEQUENCE
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if short else nullcontext()
    return context


def _load(path: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    check_model(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()  # no dropout: the log-probs of a response are one number
    tokens = torch.arange(2)[None]
    with torch.no_grad():
        head = model.get_output_embeddings()(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
        if not torch.equal(head, model(input_ids=tokens, use_cache=False).logits):
            raise DataError(f"model '{path}': its logits are more than its head over its last hidden state; rlgraph cannot train it")
    return model


def _shard(policy: _Policy, mesh: DeviceMesh, dtype: torch.dtype) -> list[Any]:
    alone = mesh.size() == 1  # then gathered weights are a cast and not a transfer: once a pass is enough
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units = [*policy.model.base_model.layers, policy]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone)
    if not alone:  # losses are normalised by the totals of all ranks, so that gradients are summed and not averaged
        for unit in units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    return units


def _join(rank: int, world: int) -> bool:
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, world):
            raise GraphError(f"FsdpEngine(rank={rank}, world={world}): the process group has rank {found[0]} of {found[1]}; give the same")
        return False
    if world > 1:
        raise GraphError(f"FsdpEngine(world={world}): call torch.distributed.init_process_group on every rank before")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True


def _unpack(values: torch.Tensor, part: MicroBatch, width: int) -> torch.Tensor:
    """Return `[rows, T]` with the values at their places and 0 elsewhere."""
    return values.new_zeros(len(part.rows), width).index_put((part.row, part.column), values)


def _rows(batch: Columns, rows: torch.Tensor, device: torch.device) -> Columns:
    def pick(column: Column) -> Column:
        return column[rows.to(column.device)].to(device) if isinstance(column, torch.Tensor) else [column[i] for i in rows.tolist()]

    return {name: pick(column) for name, column in batch.items()}


def _summed(parts: list[dict[str, float]], world: int) -> dict[str, float]:
    """Return the sum of the metrics over micro-batches and ranks, in the order of the ranks, the same on every rank."""
    gathered: list[Any] = [parts]
    if world > 1:
        gathered = [None] * world
        dist.all_gather_object(gathered, parts)
    total = {"actor/pg_loss": 0.0}
    for part in (part for parts in gathered for part in parts):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _tensor(batch: Columns, name: str) -> torch.Tensor:
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column


def _shape(batch: Columns) -> tuple[int, int]:
    rows, width = _tensor(batch, "responses").shape
    return rows, width


def _count_tokens(batch: Columns) -> int:
    return int(_tensor(batch, "prompt_mask").sum() + response_lengths(_tensor(batch, "response_mask")).sum())


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(value: torch.Tensor, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Return a moment as the optimizer holds it: sharded like its parameter; the step count is a plain scalar."""
    if key == "step" or not isinstance(parameter, DTensor):
        return value.clone()
    return DTensor.from_local(
        value.clone(), parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
