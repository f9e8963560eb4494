"""Predicted and measured step time of batches and versions that join while responses decode, on Ray.

    python benchmarks/speed/joining.py [--json PATH] [--engine vllm|transformers|waiting] [--only WORD]

One profile of plain asynchronous runs gives the costs; prompts of two lengths separate prefill from decoding. These costs predict the
loop with `continuous`, with `interrupt` and with both; then each runs. Responses end at random, so they have a long tail, which joining
is for. The learning rate is near 0, so lengths stay those of the profile. The plain loop is predicted and run too: its error is the
error of the machine and the costs without any joining. The engine "waiting" waits as long as a decode law says, under the same rollout
and runtime.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
from support.simulated_stages import ByTokens, SimulatedPolicy
from support.tiny import WeightedLikelihood
from support.waiting_engine import WaitingGenerator

import rlgraph as rg
from rlgraph.engines.hf_models.pretrained import tiny_model
from rlgraph.graph.nodes import Output, declare
from rlgraph.plan import calibrate
from rlgraph.plan.cost_functions import Decode
from rlgraph.runtime.driver.ray_cluster import start_ray, stop_ray

WARM_UP, STEPS, PROFILED = 4, 24, 16
Interrupt = Literal["keep", "recompute"] | None


LONG_TAIL = rg.Lengths((0.0, 0.5, 0.9, 0.98, 1.0), (10.0, 30.0, 60.0, 125.0, 200.0))
WAITED = Decode(step_s=5e-3, sequence_s=0.1e-3, prefill_s=0.02e-3)
UPDATE_TOKEN_S = 0.15e-3


@dataclass(frozen=True)
class Waiting:
    """The same loop over an engine and a trainer that wait by a law, so that a busy machine disturbs them less."""

    folder: str
    engine: str
    depth: int = 1
    continuous: bool = False
    interrupt: Interrupt = None
    prompt: str = "{i} + {i} ="

    def graph(self) -> rg.Graph:
        pools = {name: rg.Pool(name) for name in ("rollout", "train")}
        sampling = rg.Sampling(max_tokens=256)
        generator = WaitingGenerator(
            self.folder, pool=pools["rollout"], sampling=sampling, max_context=512, law=WAITED, lengths=LONG_TAIL, load_s=0.05
        )
        weights = rg.feedback("weights", depth=self.depth)
        items = [{"prompt": self.prompt.format(i=i), "answer": str(2 * i)} for i in range(40)]
        source = rg.prompts(items, count=16)
        rollout = generator.rollout(source, weights, group_size=4, continuous=self.continuous, interrupt=self.interrupt)
        rewards = rg.reward(length_reward, rollout)
        train = ByTokens(0.05, UPDATE_TOKEN_S)
        reads = ("prompt_mask", "response_mask", "weight_version", "rewards")
        policy = SimulatedPolicy("vector", pool=pools["train"])
        update = declare("update", train, [rollout, rewards], reads=reads, writes=(), model=policy)
        weights.close(Output(update, "weights"))
        return rg.Graph("joining", Output(update, "metrics"))


@dataclass(frozen=True)
class Loop:
    """GRPO of a small model, one core for each side; a response ends with one of so many tokens, or at 160."""

    folder: str
    engine: Any  # "vllm" or "transformers"
    depth: int = 1
    continuous: bool = False
    interrupt: Interrupt = None
    prompt: str = "{i} + {i} ="
    stops: int = 8

    def graph(self) -> rg.Graph:
        sampling = rg.Sampling(max_tokens=160, stop_token_ids=tuple(range(1, 1 + self.stops)))
        generator = rg.Generator(
            self.folder, pool=rg.Pool("rollout"), engine=self.engine, sampling=sampling, max_context=400, dtype="float32"
        )
        policy = rg.Policy(self.folder, pool=rg.Pool("train"), dtype="float32", optimizer=rg.AdamW(lr=1e-9))
        weights = rg.feedback("weights", depth=self.depth)
        items = [{"prompt": self.prompt.format(i=i), "answer": str(2 * i)} for i in range(40)]
        source = rg.prompts(items, count=16)
        rollout = generator.rollout(source, weights, group_size=4, continuous=self.continuous, interrupt=self.interrupt)
        advantages = rg.advantages(rollout, rg.reward(length_reward, rollout), estimator=rg.GRPO())
        step = policy.update(rollout, advantages, loss=WeightedLikelihood())
        weights.close(step.weights)
        return rg.Graph("joining", step.metrics)


WAYS: dict[str, dict[str, Any]] = {
    "plain, depth 1": {"depth": 1},
    "continuous, depth 1": {"depth": 1, "continuous": True},
    "continuous, depth 2": {"depth": 2, "continuous": True},
    "interrupt keep, depth 2": {"depth": 2, "interrupt": "keep"},
    "interrupt recompute, depth 2": {"depth": 2, "interrupt": "recompute"},
    "both, keep, depth 2": {"depth": 2, "interrupt": "keep", "continuous": True},
}


def length_reward(responses: list[str]) -> list[float]:
    return [float(len(set(text)) % 7) for text in responses]


@dataclass(frozen=True)
class Found:
    engine: str
    name: str
    predicted_s: float
    measured_s: float  # the mean of the steps that were no stalls
    standard_error_s: float
    plainly_s: float  # predicted as if nothing joined
    own_s: float  # fitted to the costs of the run itself
    marks: tuple[str, ...]  # what the plan says is not predicted
    load: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def measured(engine: str, folder: str, only: str) -> Iterator[Found]:
    kind: type[Loop | Waiting] = Waiting if engine == "waiting" else Loop
    profiled = [kind(folder, engine), kind(folder, engine, prompt="{i} + {i} = " + "what is it? " * 12)]
    cluster = rg.Cluster(cpus=2)
    costs = rg.profile([loop.graph() for loop in profiled], cluster, PROFILED)
    print(costs.nodes["rollout"], costs.lengths and costs.lengths.mean, costs.swap_s, costs.receive_s)
    plainly = {depth: rg.compile(kind(folder, engine, depth).graph(), cluster, costs).prediction.step_s for depth in (1, 2)}
    for name, way in WAYS.items():
        if only not in name:
            continue
        loop = kind(folder, engine, **way)
        plan = rg.compile(loop.graph(), cluster, costs)
        with plan.launch() as job:
            seconds = np.array([step.seconds for step in job.steps(STEPS + WARM_UP)][WARM_UP:])
            own_s = rg.compile(loop.graph(), cluster, job.costs()).prediction.step_s
        expected = plan.prediction
        error = statistics.stdev(seconds.tolist()) / STEPS**0.5
        yield Found(
            engine, name, expected.step_s, calibrate.mean(seconds), error, plainly[loop.depth], own_s, expected.left_out, os.getloadavg()[0]
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures here as well; those of another engine stay")
    arguments.add_argument("--engine", choices=["vllm", "transformers", "waiting"], default="vllm")
    arguments.add_argument("--only", default="", help="only ways whose name has this in it")
    given = arguments.parse_args()
    ours, load = start_ray(), os.getloadavg()
    earlier = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"engines": {}}
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model(Path(folder) / "small", hidden=256, layers=4, context=512))
        for one in measured(given.engine, model, given.only):
            found.append(one)
            print(
                f"{one.engine:13} {one.name:30} predicted {1e3 * one.predicted_s:7.1f} ms, measured {1e3 * one.measured_s:7.1f} ms "
                f"± {1e3 * one.standard_error_s:5.1f}  {one.error:+6.1%}; as if nothing joined {1e3 * one.plainly_s:7.1f} ms; "
                f"fitted {1e3 * one.own_s:7.1f} ms; load {one.load:.1f}",
                flush=True,
            )
            if given.json:
                figures = {
                    "machine": {"cores": rg.local_cluster().cpus, "load_before": load, "load_after": os.getloadavg()},
                    "steps": STEPS,
                    "worst_error": max(abs(each.error) for each in found),
                    "ways": [{**asdict(each), "error": each.error} for each in found],
                }
                given.json.write_text(json.dumps({"engines": {**earlier["engines"], given.engine: figures}}, indent=1) + "\n")
    if ours:
        stop_ray()


if __name__ == "__main__":
    main()
