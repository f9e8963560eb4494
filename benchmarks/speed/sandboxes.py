"""A thousand conversations at once with sandboxes that take 1 to 60 s a turn: how far is a step from the slowest of them?

    python benchmarks/speed/sandboxes.py [--conversations 1000] [--turns 4] [--scale 10] [--json PATH]

The engine is simulated: a decode step takes 25 ms, whatever is open, and writes a token for each open response. Sandboxes are simulated
too: each turn waits for 1 to 60 s, log-uniformly. All times are divided by `--scale`. No step can be faster than its slowest conversation
alone: its sandbox's seconds, and its tokens at a decode step each. What remains is rlgraph's own work: 1,000 calls in flight, their
results, templates and tokens between turns.
"""

import argparse
import asyncio
import json
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

import rlgraph as rg
from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.engines.hf_models.pretrained import tiny_model
from rlgraph.nodes.base import Context
from rlgraph.values.sampling import Running

DECODE_S = 0.025
LEAST_S, MOST_S = 1.0, 60.0
TURN_TOKENS = (20, 80)


class Simulated(GenerateEngine):
    """Writes one token for each open response in a step of a fixed time."""

    def __init__(self, step_s: float, close: int) -> None:
        super().__init__()
        self.step_s, self.close_token = step_s, close
        self.open: dict[str, tuple[int, int]] = {}  # tokens so far, and of the turn
        self.busy_s, self.late_s, self.ended = 0.0, 0.0, time.perf_counter()

    def submit(self, request: Request) -> None:
        self.open[request.id] = (0, random.Random(request.seed).randint(*TURN_TOKENS))

    def decode(self) -> dict[str, Response]:
        start = time.perf_counter()
        done = {}
        for name, (count, length) in list(self.open.items()):
            self.open[name] = (count + 1, length)
            if count + 1 == length:
                del self.open[name]
                tokens = [*range(100, 99 + length), self.close_token]
                done[name] = Response(tokens, [-0.5] * length, finish="stop")
        time.sleep(max(start + self.step_s - time.perf_counter(), 0.0))
        self.busy_s += time.perf_counter() - start
        return done

    def unfinished(self) -> int:
        return len(self.open)

    def written(self) -> dict[str, int]:
        return {name: count for name, (count, _) in self.open.items()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        return {name: Response([], []) for name in ids if self.open.pop(name, None)}

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None: ...

    def context_length(self) -> int:
        return 4096

    def close(self) -> None: ...


class Sandbox:
    """Takes its time for each turn."""

    scale = 1.0
    waited: ClassVar[dict[int, float]] = {}

    def __init__(self, number: int) -> None:
        self.number, self.draws = number, random.Random(number)

    async def reset(self) -> None:
        Sandbox.waited[self.number] = 0.0

    async def step(self, said: rg.Message) -> rg.Turn:
        wait_s = LEAST_S * math.exp(self.draws.random() * math.log(MOST_S / LEAST_S)) / self.scale
        Sandbox.waited[self.number] += wait_s
        await asyncio.sleep(wait_s)
        return rg.Turn([rg.Message("user", "Go on.")])

    async def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="20 conversations, 200 times as fast, once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.smoke:
        given.conversations, given.scale, given.repeats = 20, 200.0, 1
    Sandbox.scale = given.scale
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_model(Path(folder) / "tiny", chat=True))
        context = Context()
        close = context.tokenizer(path).encode("<|im_end|>", add_special_tokens=False)[0]
        engine = context.engine = Simulated(DECODE_S / given.scale, close)
        generator = rg.Generator(path, pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=1000))
        items = [{"prompt": f"task {i}", "number": i} for i in range(given.conversations)]
        prompts = rg.prompts(items, count=given.conversations)
        stage = generator.rollout(prompts, agent=Sandbox, max_turns=given.turns).node.operation.start(context)
        for step in range(given.repeats):
            batch = prompts.node.operation.batch(step)  # type: ignore[attr-defined]
            engine.busy_s, start = 0.0, time.perf_counter()
            columns, metrics = stage(step, batch)
            step_s = time.perf_counter() - start
            lengths = columns["response_mask"].sum(-1).tolist()
            alone = [Sandbox.waited[int(n)] + length * engine.step_s for n, length in zip(batch["numbers"], lengths, strict=True)]
            open_s = step_s - metrics["agent/idle_s"]
            rows.append(
                {
                    "step_s": step_s,
                    "slowest_alone_s": max(alone),
                    "step_over_bound": step_s / max(alone),
                    "engine_idle_while_any_could_decode": (open_s - engine.busy_s) / open_s,
                    "one_after_another_s": sum(alone),
                    "seconds_p50": metrics["agent/seconds/p50"],
                    "seconds_p99": metrics["agent/seconds/p99"],
                }
            )
    found: dict[str, Any] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    found["spread_of_step_over_bound"] = [min(row["step_over_bound"] for row in rows), max(row["step_over_bound"] for row in rows)]
    found |= {"settings": {key: value for key, value in vars(given).items() if key != "json"}, "machine": platform.machine()}
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
