"""A generator whose engine waits as long as a law of decoding says, under the real rollout: nothing is computed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.nodes.rollout.rollout import Generator
from rlgraph.plan.cost_functions import Decode
from rlgraph.plan.lengths import Lengths
from rlgraph.values.sampling import Running


class WaitingEngine(GenerateEngine):
    """Decodes responses of drawn lengths: a step takes `step_s` and `sequence_s` for each that runs, a token read `prefill_s`."""

    def __init__(self, decode: Decode, lengths: Lengths, load_s: float) -> None:
        super().__init__()
        self.law, self.lengths, self.load_s = decode, lengths, load_s
        self.begun: dict[str, Request] = {}
        self.have: dict[str, int] = {}  # tokens of each running response
        self.ends: dict[str, int] = {}  # the length of each
        self.unread = 0  # tokens that the next step reads first

    def submit(self, request: Request) -> None:
        drawn = np.interp(np.random.default_rng(request.seed % (1 << 32)).random(), self.lengths.at, self.lengths.tokens)
        self.begun[request.id], self.have[request.id], self.ends[request.id] = request, 0, int(np.ceil(drawn))
        self.unread += len(request.prompt)

    def decode(self) -> dict[str, Response]:
        time.sleep(self.law.prefill_s * self.unread + self.law.step_s + self.law.sequence_s * len(self.have))
        self.unread = 0
        self.have = {name: count + 1 for name, count in self.have.items()}
        return self.drop([name for name, count in self.have.items() if count >= self.ends[name]])

    def count_requests(self) -> int:
        return len(self.have)

    def count_tokens(self) -> dict[str, int]:
        return dict(self.have)

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        return {name: Response([1] * count, [-1.0] * count) for name in ids if (count := self.have.pop(name, None)) is not None}

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        time.sleep(self.load_s)
        if running == "recompute":
            self.unread += sum(len(self.begun[name].prompt) + count for name, count in self.have.items() if count)

    def context_length(self) -> int:
        return 1 << 20

    def close(self) -> None:
        pass


@dataclass(frozen=True, eq=False, kw_only=True)
class WaitingGenerator(Generator):
    """A generator that waits; its tokens are those of the folder `path`."""

    law: Decode = field(default_factory=Decode)
    lengths: Lengths = field(default_factory=lambda: Lengths((0.0, 1.0), (1.0, 2.0)))
    load_s: float = 0.0

    def load(self, context: Any) -> WaitingEngine:
        return WaitingEngine(self.law, self.lengths, self.load_s)
