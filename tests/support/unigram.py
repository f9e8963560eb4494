"""Two engines of a user's own, as small as they get: a table of logits, one for each token, that samples and that is trained.

Each is brought by one spec, and all else of a run is the library's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlgraph.algorithms.masks import Totals
from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.columns import Columns
from rlgraph.engines.api import GenerateEngine, Guard, Loss, Place, Request, Response, check_request, check_weights
from rlgraph.engines.fsdp import distributed_checkpoint
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.engines.registry import EngineSpec, TrainerSpec
from rlgraph.nodes.base import tensor_of
from rlgraph.plan.estimates import stays_awake
from rlgraph.plan.model_shapes import Need, Workload
from rlgraph.values.sampling import Running

CONTEXT = 128


@dataclass
class Held:
    request: Request
    draws: torch.Generator
    response: Response = field(default_factory=lambda: Response([], [], finish="length"))


class Unigram(GenerateEngine):
    """Samples each token by the table, whatever came before."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = torch.zeros(vocab)
        self.held: dict[str, Held] = {}

    def submit(self, request: Request) -> None:
        check_request(request, self.held, CONTEXT, len(self.table))
        self.held[request.id] = Held(request, torch.Generator().manual_seed(request.seed))

    def decode(self) -> dict[str, Response]:
        log_probs = self.table.log_softmax(-1)
        for sequence in self.held.values():
            token = int(torch.multinomial(log_probs.exp(), 1, generator=sequence.draws))
            sequence.response.tokens.append(token)
            sequence.response.log_probs.append(float(log_probs[token]))
        return self.drop([name for name, s in self.held.items() if len(s.response.tokens) == s.request.sampling.max_tokens])

    def count_requests(self) -> int:
        return len(self.held)

    def count_tokens(self) -> dict[str, int]:
        return {name: len(sequence.response.tokens) for name, sequence in self.held.items()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        return {name: replace(self.held.pop(name).response) for name in ids if name in self.held}

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        check_weights(weights, {"table": tuple(self.table.shape)})
        self.table.copy_(weights["table"])

    def context_length(self) -> int:
        return CONTEXT

    def close(self) -> None:
        self.held.clear()


class UnigramTrainer:
    """Trains the table by plain gradient steps: a `TrainEngine` of one rank."""

    def __init__(self, vocab: int, lr: float) -> None:
        self.table, self.lr, self.steps = torch.zeros(vocab), lr, torch.zeros((), dtype=torch.int64)
        self.saver = distributed_checkpoint.Saver(0, 1)

    def scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        log_probs = (self.table / temperature).log_softmax(-1)
        return torch.where(tensor_of(batch, "response_mask"), log_probs[tensor_of(batch, "responses")], 0.0)

    def scores_and_squares(self, batch: Columns, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        squares = (self.table / temperature).softmax(-1).square().sum()
        return self.scores(batch, temperature=temperature), tensor_of(batch, "response_mask") * squares

    def update(self, batch: Columns, loss: Loss, *, temperature: float = 1.0, guard: Guard | None = None) -> dict[str, float]:
        self.table.requires_grad_()
        value, metrics = loss(self.scores(batch, temperature=temperature), batch, Totals.of(tensor_of(batch, "response_mask")), None)  # type: ignore[call-arg]
        (gradient,) = torch.autograd.grad(value, self.table)
        self.table.requires_grad_(False)
        metrics = {"actor/pg_loss": value.item(), "actor/grad_norm": gradient.norm().item(), **metrics}
        if guard is None or guard(metrics):
            self.table.sub_(gradient, alpha=self.lr)
            self.steps += 1
        return {**metrics, "steps": float(self.steps)}

    def weight_shards(self) -> Iterator[WeightShard]:
        return unsharded_weights({"table": self.table})

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        return self.saver.save(self._state(), folder, deadline_s)

    def load(self, folder: Path) -> None:
        distributed_checkpoint.read(folder, self._state())

    def _state(self) -> dict[str, torch.Tensor]:
        return {"table": self.table, "steps": self.steps}

    def sleep(self) -> int | None:
        return None

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def load_engine(generator: Any, place: Place) -> GenerateEngine:
    return Unigram(check_model(generator.path).vocab_size)


def load_trainer(policy: Any, place: Place) -> UnigramTrainer:
    assert policy.scores == "log_probs"
    return UnigramTrainer(check_model(policy.path).vocab_size, policy.optimizer.lr)


def table_memory(work: Workload) -> Need:
    return Need({"weights": 4 * work.shape.vocab}, {}, 0)


ENGINE = EngineSpec(name="unigram", load=load_engine, sleep_bytes=stays_awake, memory_estimate=table_memory)
TRAINER = TrainerSpec(name="unigram", load=load_trainer, sleep_bytes=stays_awake, memory_estimate=table_memory)
