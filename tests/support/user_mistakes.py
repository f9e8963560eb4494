"""Mistakes that users make: what is wrong, where it is noticed, and the words of the answer. Read by `test_mistakes.py`."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from support import fakes

import rlgraph as rg
from rlgraph import algorithms as alg
from rlgraph.errors import ConfigError, DataError, GraphError, PlanError, RlgraphError

Stage = Literal["declare", "compile", "launch", "run"]
SECONDS: dict[Stage, float] = {"declare": 20.0, "compile": 20.0, "launch": 60.0, "run": 60.0}  # on a busy machine
ITEMS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]


@dataclass(frozen=True)
class Mistake:
    """A mistake: `make` gets the folder of a tiny model and gives a graph, a plan, or the error at once."""

    stage: Stage
    make: Callable[[Path], Any]
    error: type[Exception]
    words: str


def right(responses: list[str], answers: list[str]) -> list[float]:
    return [float(r == a) for r, a in zip(responses, answers, strict=True)]


def graph(model: Path | str = "m", **changed: Any) -> rg.Graph:
    """A small GRPO graph, with parts changed."""
    pool = changed.get("pool", rg.Pool("shared"))
    sampling = changed.get("sampling", rg.Sampling(max_tokens=4))
    generator = rg.Generator(
        changed.get("generator_path", model), pool=pool, sampling=sampling, engine="transformers", **changed.get("generator", {})
    )
    policy = rg.Policy(changed.get("policy_path", model), pool=changed.get("train_pool", pool), **changed.get("policy", {}))
    weights = rg.feedback("weights", depth=changed.get("depth", 0))
    prompts = rg.prompts(changed.get("data", ITEMS), **{"count": 2, **changed.get("prompts", {})})
    rollout = generator.rollout(prompts, weights, **{"group_size": 2, **changed.get("rollout", {})})
    rewards = rg.reward(changed.get("reward", right), prompts, rollout, **changed.get("rewarding", {}))
    advantages = rg.advantages(rollout, rewards, estimator=changed.get("estimator", rg.GRPO()))
    step = policy.update(rollout, advantages, loss=changed.get("loss", rg.ClippedLoss()), **changed.get("update", {}))
    weights.close(step.weights)
    return rg.Graph("small", step.metrics)


def declared(words: str, error: type[Exception] = GraphError, **changed: Any) -> Mistake:
    return Mistake("declare", lambda model: graph(**changed), error, words)


def made(words: str, make: Callable[[], Any], error: type[Exception] = GraphError) -> Mistake:
    return Mistake("declare", lambda model: make(), error, words)


def compiled(words: str, make: Callable[[], Any], error: type[Exception] = PlanError) -> Mistake:
    return Mistake("compile", lambda model: make(), error, words)


def launched(words: str, error: type[Exception] = DataError, *, settings: dict[str, Any] | None = None, **changed: Any) -> Mistake:
    def launch(model: Path) -> Any:
        return rg.compile(graph(model, **changed), rg.Cluster(cpus=2)).launch(**(settings or {}))

    return Mistake("launch", launch, error, words)


def ran(words: str, reward: Callable[..., Any], **changed: Any) -> Mistake:
    """A reward that goes wrong as it is called, in the one process of the oracle."""

    def run(model: Path) -> Any:
        with rg.compile(graph(model, reward=reward, **changed), rg.Cluster(cpus=2)).run_here() as job:
            return list(job.steps(1))

    return Mistake("run", run, RlgraphError, words)


def row(place: int, **fields: Any) -> list[dict[str, Any]]:
    """The items, one of them changed; a field given as `...` is left out."""
    changed = {name: value for name, value in {**ITEMS[place], **fields}.items() if value is not ...}
    return [*ITEMS[:place], changed, *ITEMS[place + 1 :]]


LOCK = threading.Lock()


def holding() -> Callable[[list[str]], list[float]]:
    """A reward that holds a lock, and is defined where it is used, as in a script."""
    lock = threading.Lock()

    def locked(responses: list[str]) -> list[float]:
        with lock:
            return [0.0] * len(responses)

    return locked


def held(responses: list[str], lock: Any = None) -> list[float]:
    return [0.0] * len(responses)


def scored(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


def trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def broken(responses: list[str]) -> list[float]:
    raise KeyError("gold")


def picky(responses: list[str], answers: list[str]) -> list[float]:
    if "3" in answers:
        raise ValueError("three")
    return [0.0] * len(responses)


def pool() -> rg.Pool:
    return rg.Pool("p")


def config(text: str) -> Callable[[Path], Any]:
    """A file of settings, read for a dataclass."""

    def read(folder: Path) -> Any:
        file = folder.parent / "settings.yaml"
        file.write_text(text)
        return rg.config(Settings, [f"config={file}"])

    return read


@dataclass
class Settings:
    steps: int = 1


def plan_json(change: Callable[[str], str]) -> Callable[[], Any]:
    return lambda: rg.Plan.from_json(change(rg.compile(graph(), rg.Cluster(cpus=2)).to_json()))


def stale_in_one_pool() -> rg.Graph:
    pool = rg.Pool("shared")
    return fakes.vector_loop(1, pools=(pool, pool), middle=lambda rollout: fakes.scored_on(pool, rollout))


def two_updates() -> rg.Graph:
    generator, policy = rg.Generator("m", pool=rg.Pool("r")), rg.Policy("m", pool=rg.Pool("t"))
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts(ITEMS, 2)
    rollout = generator.rollout(prompts, weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(right, prompts, rollout), estimator=rg.GRPO())
    first = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    second = policy.update(rollout, advantages, loss=rg.ClippedLoss(), name="again")
    weights.close(first.weights)
    return rg.Graph("two", first.metrics, second.metrics)


MODELS = {
    "a pool by name": declared("pool is a Pool; write pool=rg.Pool('rollout')", pool="rollout"),
    "a pool's class": declared("pool is a Pool; that is the class", pool=rg.Pool),
    "sampling as a dict": declared("write sampling=rg.Sampling(max_tokens=…)", sampling={"max_tokens": 8}),
    "sampling as a number": declared("sampling is a Sampling", sampling=8),
    "context as text": declared("write max_context=64, without quotes", generator={"max_context": "64"}),
    "no context": declared("a whole number of tokens, at least 2", generator={"max_context": 0}),
    "a context of a fraction": declared("max_context is a whole number", generator={"max_context": 64.5}),
    "an optimizer by name": declared("write optimizer=rg.AdamW(…)", policy={"optimizer": "adamw"}),
    "an optimizer's class": declared("that is the class: write optimizer=rg.AdamW()", policy={"optimizer": rg.AdamW}),
    "an optimizer of torch": declared("optimizer is an AdamW", policy={"optimizer": torch.optim.AdamW}),
    "a dtype of torch": declared("write dtype='float32'", policy={"dtype": torch.float32}),
    "a dtype by its short name": declared("write dtype='float32'", policy={"dtype": "fp32"}),
    "bf16": declared("write dtype='bfloat16'", generator={"dtype": "bf16"}),
    "a dtype that is none": declared("['auto', 'bfloat16', 'float32']", generator={"dtype": "int8"}),
    "no seed": declared("leave it out for 0", generator={"seed": None}),
    "a negative seed": declared("seed is a whole number of at least 0", generator={"seed": -1}),
    "a seed as text": declared("write seed=1, without quotes", generator={"seed": "1"}),
    "an unknown engine": made("['vllm', 'transformers', 'sglang']", lambda: rg.Generator("m", pool=pool(), engine="llama")),  # type: ignore[arg-type]
    "an engine misspelt": made("write engine='vllm'", lambda: rg.Generator("m", pool=pool(), engine="vLLM")),  # type: ignore[arg-type]
    "memory in percent": made("above 0 and below 1", lambda: rg.Generator("m", pool=pool(), memory=90)),
    "no engines": made("tensor_parallel is a whole number of at least 1", lambda: rg.Generator("m", pool=pool(), tensor_parallel=0)),
    "no model": made("path is a non-empty text", lambda: rg.Policy("", pool=pool())),
    "None as a model": made("Policy(path=None)", lambda: rg.Policy(None, pool=pool())),  # type: ignore[arg-type]
    "a micro-batch of nothing": declared("micro_batch_tokens is a whole number", policy={"micro_batch_tokens": 0}),
    "a flag as text": declared("write recompute=True", policy={"recompute": "true"}),
    "a flag as a number": declared("write recompute=True", policy={"recompute": 1}),
    "data parallel as text": declared("write data_parallel=2, without quotes", policy={"data_parallel": "2"}),
    "a critic's optimizer": made("write optimizer=rg.AdamW(…)", lambda: rg.Critic("m", pool=pool(), optimizer="sgd")),  # type: ignore[arg-type]
    "a reference that learns": made("optimizer", lambda: rg.Reference("m", pool=pool(), optimizer=rg.AdamW())),  # type: ignore[call-arg]
    "a label below 0": made("label is a whole number of at least 0", lambda: rg.RewardModel("m", pool=pool(), label=-1)),
}
POOLS = {
    "a pool without a name": made("name is a non-empty text", lambda: rg.Pool("")),
    "a share of 0": made("share is a positive number", lambda: rg.Pool("p", share=0)),
    "a share as text": made("write share=1, without quotes", lambda: rg.Pool("p", share="1")),  # type: ignore[arg-type]
    "no GPUs": made("an exact count", lambda: rg.Pool("p", gpus=0)),
    "GPUs and cores": made("a pool is of one kind", lambda: rg.Pool("p", gpus=1, cpus=1)),
    "a share and a count": made("give one of them", lambda: rg.Pool("p", share=2, gpus=1)),
}
SAMPLING = {
    "no tokens": made("max_tokens is a whole number of at least 1", lambda: rg.Sampling(max_tokens=0)),
    "tokens as text": made("write max_tokens=8, without quotes", lambda: rg.Sampling(max_tokens="8")),  # type: ignore[arg-type]
    "tokens as a float": made("write max_tokens=8", lambda: rg.Sampling(max_tokens=8.0)),  # type: ignore[arg-type]
    "a negative temperature": made("at least 0, and 0 is greedy", lambda: rg.Sampling(temperature=-1)),
    "no temperature": made("leave it out for 1.0", lambda: rg.Sampling(temperature=None)),  # type: ignore[arg-type]
    "top_p in percent": made("at most 1, and 1 keeps all tokens", lambda: rg.Sampling(top_p=95)),
    "top_k of -1": made("top_k is a whole number of at least 0", lambda: rg.Sampling(top_k=-1)),
    "a stop token as text": made("item 0 is '</s>'", lambda: rg.Sampling(stop_token_ids=("</s>",))),  # type: ignore[arg-type]
    "one stop token": made("write stop_token_ids=(2,)", lambda: rg.Sampling(stop_token_ids=2)),  # type: ignore[arg-type]
    "NaN as temperature": made("temperature is", lambda: rg.Sampling(temperature=float("nan"))),
}
OPTIMIZER = {
    "a learning rate of 0": made("a learning rate above 0", lambda: rg.AdamW(lr=0)),
    "a learning rate as text": made("write lr=1e-06, without quotes", lambda: rg.AdamW(lr="1e-6")),  # type: ignore[arg-type]
    "one beta": made("betas is a tuple of 2", lambda: rg.AdamW(betas=0.9)),  # type: ignore[arg-type]
    "three betas": made("it has 3", lambda: rg.AdamW(betas=(0.9, 0.9, 0.9))),  # type: ignore[arg-type]
    "a beta of 1": made("item 1 is 1.0", lambda: rg.AdamW(betas=(0.9, 1.0))),
    "no clipping": made("1e9 does not clip", lambda: rg.AdamW(grad_clip=0)),
    "no clipping, as None": made("1e9 does not clip", lambda: rg.AdamW(grad_clip=None)),  # type: ignore[arg-type]
    "half a step of warm-up": made("warmup_steps is a whole number", lambda: rg.AdamW(warmup_steps=0.5)),  # type: ignore[arg-type]
}
NODES = {
    "no groups": declared("group_size=0; group_size is a whole number of responses", rollout={"group_size": 0}),
    "groups as text": declared("write group_size=4, without quotes", rollout={"group_size": "4"}),
    "groups as a float": declared("write group_size=4", rollout={"group_size": 4.0}),
    "turns without tools": declared("no tools and no agent, so there is one turn", rollout={"max_turns": 2}),
    "tools that are none": declared("tools is a Tools", rollout={"tools": "python"}),
    "chunks that do not divide": declared("does not divide", rollout={"chunks": 3}),
    "an unknown interrupt": declared("['keep', 'recompute']", rollout={"interrupt": "drop"}),
    "refill of True": declared("pass what to refill by", rollout={"refill": True}),
    "an edge by name": made(
        "pass what rlgraph.feedback(...) returned",
        lambda: rg.Generator("m", pool=pool()).rollout(rg.prompts(ITEMS, 1), "weights"),  # type: ignore[arg-type]
    ),
    "prompts that are a list": made("pass the output of another node", lambda: rg.Generator("m", pool=pool()).rollout(ITEMS)),  # type: ignore[arg-type]
    "a negative depth": made("how many weight versions", lambda: rg.feedback("w", depth=-1)),
    "a depth as text": made("write depth=1, without quotes", lambda: rg.feedback("w", depth="1")),  # type: ignore[arg-type]
    "a depth of True": made("how many weight versions", lambda: rg.feedback("w", depth=True)),
    "three buffers": made("so that it receives while it decodes", lambda: rg.feedback("w", depth=1, buffers=3)),
    "a second buffer of no use": made("nothing is decoded while weights arrive", lambda: rg.feedback("w", depth=0, buffers=2)),
    "the estimator by name": declared("pass an estimator object, as estimator=rg.GRPO()", estimator="grpo"),
    "the estimator's class": declared("the class GRPO; pass an estimator object", estimator=rg.GRPO),
    "the loss by name": declared("pass a loss object, as loss=rg.ClippedLoss()", loss="ppo"),
    "the loss's class": declared("the class ClippedLoss; pass a loss object", loss=rg.ClippedLoss),
    "no epochs": declared("epochs is a whole number of at least 1", update={"epochs": 0}),
    "mini-batches that do not divide": declared("equally large", update={"mini_batches": 3}),
    "guards as text": declared("write guards=rg.Guards(…)", update={"guards": "stop"}),
    "a warm-up without a critic": declared("no critic's values lead to it", update={"critic_warmup": 2}),
    "an unknown argument": declared("unexpected keyword argument 'groups'", TypeError, rollout={"groups": 4}),
    "a graph of nothing": made("has no outputs", lambda: rg.Graph("g")),
    "a graph without a name": made("Graph(name=the batch of 'prompts')", lambda: rg.Graph(rg.prompts(ITEMS, 1))),  # type: ignore[arg-type]
    "two updates of one policy": made("'update' and 'again' both update one policy", two_updates),
    "a stale loop in one pool": made("nothing can overlap", stale_in_one_pool),
    "clipping in percent": made("clip_low is a finite number of at least 0 and at most 1", lambda: rg.ClippedLoss(clip_low=20)),
    "gamma above 1": made("gamma is", lambda: rg.GAE(gamma=1.5)),
    "an unknown aggregation": made("token-mean", lambda: rg.ClippedLoss(aggregation="mean")),
    "a misspelt aggregation": made("write aggregation='token-mean'", lambda: rg.ClippedLoss(aggregation="token_mean")),
    "an unknown estimator": made("there is no estimator 'grop'", lambda: alg.estimator("grop")),
    "a KL of -1": made("at least 0", lambda: rg.ClippedLoss(kl_coef=-1)),
    "a weight's class": made("that is the class: write weights=", lambda: alg.RolloutCorrection(rg.TruncatedIS)),  # type: ignore[arg-type]
    "guards that shrug": made("['skip', 'stop']", lambda: rg.Guards(nonfinite="ignore")),  # type: ignore[arg-type]
    "no patience": made("skipped steps, at least 1", lambda: rg.Guards(patience=0)),
    "no tool": made("has no tool", lambda: rg.Tools([])),
    "a tool that is not async": made("an async function", lambda: rg.Tools([right])),  # type: ignore[list-item]
    "no time for a tool": made("a number of seconds above 0", lambda: rg.Tools([rg.tools.calculator], deadline_s=0)),
}
DATA = {
    "no items": declared("the data set is empty", DataError, data=[]),
    "a dict of lists": declared("for row in zip(*data.values())", DataError, data={"prompt": ["a"], "answer": ["b"]}),
    "a path": declared("read the file first", DataError, data="train.jsonl"),
    "a generator": declared("give list(...) of it", DataError, data=(item for item in ITEMS)),
    "texts": declared("[{'prompt': text} for text in data]", DataError, data=["1 + 1 ="]),
    "another field": declared("name its field with prompt=", DataError, data=[{"question": "1 + 1 ="}]),
    "bytes": declared("decode it", DataError, data=[{"prompt": b"1 + 1 ="}]),
    "None as a prompt": declared("item 0 of the data set has prompt=None", DataError, data=row(0, prompt=None)),
    "a field of lists": declared("json.dumps(value)", DataError, data=[{"prompt": "a", "answer": [1]}]),
    "two fields of one column": declared(
        "both become the column 'answers'", DataError, data=[{"prompt": "a", "answer": "b", "answers": "c"}]
    ),
    "no prompts a step": declared("how many prompts a step takes", DataError, prompts={"count": 0}),
    "prompts a step as text": declared("write count=2, without quotes", DataError, prompts={"count": "2"}),
    "data without a seed": declared("leave it out for 0", DataError, prompts={"seed": None}),
    "a field that a later row lacks": launched("item 5 of the data set lacks the field 'answer'", data=row(5, answer=...)),
    "a prompt that a later row lacks": launched("item 5 of the data set lacks the field 'prompt'", data=row(5, prompt=...)),
    "None in a later row": launched("item 6 of the data set has answer=None", data=row(6, answer=None)),
    "None as a later prompt": launched("item 3 of the data set has prompt=None", data=row(3, prompt=None)),
    "another type in a later row": launched("item 4 of the data set has answer=7, a whole number", data=row(4, answer=7)),
    "messages in a later row": launched("these are messages", data=row(2, prompt=[{"role": "user", "content": "hi"}])),
    "bytes in a later row": launched("item 2 of the data set has prompt=b'1'; a prompt is text: decode it", data=row(2, prompt=b"1")),
    "a later row that is no mapping": launched("item 7 of the data set is 'x'", data=[*ITEMS[:7], "x"]),
    "an empty prompt": launched("the prompt of item 2 of the data set has 0 tokens", data=row(2, prompt="")),
    "a prompt too long": launched("the prompt of item 2 of the data set has", data=row(2, prompt="1 + " * 2000)),
}
REWARDS = {
    "no function": declared("a function that returns one number a response", reward="exact"),
    "a column that is not there": declared("reads column 'solutions'", reward=lambda solutions: [0.0]),
    "any columns": declared("name those it reads in place of **", reward=trl),
    "positional": declared("name the columns it reads", reward=lambda *columns: [0.0]),
    "a built-in": declared("name the columns it reads", reward=len),
    "verl's without its source": declared("reads column 'data_sources'", reward=scored),
    "concurrency of 0": declared("how many responses are scored at a time", rewarding={"concurrency": 0}),
    "no deadline": declared("deadline_s is a number of seconds above 0", rewarding={"deadline_s": 0}),
    "outliers of 0": declared("standard deviations above 0", rewarding={"outliers": 0}),
    "a column of another kind": declared("a reward is one number a response: name another", rewarding={"writes": "responses"}),
    "a column without a name": declared("the name of the column", rewarding={"writes": ""}),
    "a lock": launched("function 'locked' cannot be sent to a worker: its 'lock' is a lock", GraphError, reward=holding()),
    "a lock in a partial": launched("its 'lock' is a lock", GraphError, reward=partial(held, lock=LOCK)),
    "a call that raises": ran("raised KeyError: 'gold', for the batch of 4 responses, and for each of them alone", broken),
    "one response that raises": ran("raised ValueError: three, for response", picky, prompts={"count": 8}),
    "beyond float32": ran("a reward is a number of float32", lambda responses: [1e39] * len(responses)),
    "a number as text": ran("returned '1.0' for response 0", lambda responses: ["1.0"] * len(responses)),
    "NaN as a reward": ran("returned nan for response 0", lambda responses: [float("nan")] * len(responses)),
    "None as a reward": ran("returned None for response 0", lambda response: None),
    "too few rewards": ran("returned 1 rewards for 4 responses", lambda responses: [0.0]),
    "one number for all": ran("returned float; it returns one number a response", lambda responses: 0.0),
}
PLANS = {
    "a cluster by count": compiled("cluster is a Cluster", lambda: rg.compile(graph(), 2)),  # type: ignore[arg-type]
    "no graph": compiled("pass a graph", lambda: rg.compile("g", rg.Cluster())),  # type: ignore[arg-type]
    "costs as a dict": compiled("write costs=rg.Costs(rollout=…)", lambda: rg.compile(graph(), rg.Cluster(), {"rollout": 1.0})),  # type: ignore[arg-type]
    "costs of another node": compiled("", lambda: rg.compile(graph(), rg.Cluster(), rg.Costs({"roll": 1.0}))),
    "GPUs as text": compiled("write gpus=8, without quotes", lambda: rg.Cluster(gpus="8")),  # type: ignore[arg-type]
    "no cores": compiled("cpus is a whole number of at least 1", lambda: rg.Cluster(cpus=0)),
    "a negative cost": compiled("the cost of 'rollout' is -1.0", lambda: rg.Costs({"rollout": -1.0})),
    "a cost as text": compiled("the cost of 'rollout' is '1'", lambda: rg.Costs({"rollout": "1"})),  # type: ignore[dict-item]
    "groups of one": compiled(
        "(group_size=1), which leaves no baseline", lambda: rg.compile(graph(rollout={"group_size": 1}), rg.Cluster()), rg.PlanWarning
    ),
    "greedy groups": compiled(
        "temperature=0, so that all responses of a group are the same",
        lambda: rg.compile(graph(sampling=rg.Sampling(max_tokens=4, temperature=0), loss=alg.Reinforce()), rg.Cluster()),
        rg.PlanWarning,
    ),
    "an unknown key of a plan": compiled("plan.speed means nothing here", plan_json(lambda text: text.replace("{", '{"speed": 1,', 1))),
    "a key of a plan that is missing": compiled("this is rlgraph", plan_json(lambda text: text.replace('"graph"', '"grahp"', 1))),
    "no plan": compiled("this is rlgraph", lambda: rg.Plan.from_json("[]")),
    "no JSON": compiled("this is rlgraph", lambda: rg.Plan.from_json("plan")),
    "another picture": compiled(".svg or .mmd", lambda: rg.compile(graph(), rg.Cluster()).draw("plan.png")),
    "an unknown objective": compiled("by is one of", lambda: rg.tune(graph, rg.Cluster(), by="speed")),  # type: ignore[arg-type]
    "a setting without values": compiled("give the values to try", lambda: rg.tune(graph, rg.Cluster(), depth=())),
    "steps as text": Mistake(
        "run",
        lambda model: rg.compile(graph(model), rg.Cluster()).run_here().steps("3"),  # type: ignore[arg-type]
        PlanError,
        "write count=3, without quotes",
    ),
}
LAUNCH = {
    "a model that is not there": launched("no such folder", generator_path="nowhere"),
    "a model that is a file": launched("no such folder", generator_path=__file__),
    "a stop token outside of the vocabulary": launched("vocabulary", sampling=rg.Sampling(max_tokens=4, stop_token_ids=(10**6,))),
    "no room for a prompt": launched("lower max_tokens", sampling=rg.Sampling(max_tokens=10**5)),
    "an unknown dispatch": launched("dispatch is one of", PlanError, settings={"dispatch": "threads"}),
    "no time": launched("a number of seconds above 0", PlanError, settings={"deadline_s": 0}),
    "every without a checkpoint": launched("say where", PlanError, settings={"every": 2}),
    "every 0 steps": launched("every is a whole number", PlanError, settings={"checkpoint": "c", "every": 0}),
    "restarts as text": launched("write restarts=2, without quotes", PlanError, settings={"checkpoint": "c", "restarts": "2"}),
    "a checkpoint that is no path": launched("checkpoint is text", PlanError, settings={"checkpoint": 3}),
    "more GPUs than there are": Mistake(
        "launch", lambda model: rg.compile(graph(model), rg.Cluster(gpus=8)).launch(), PlanError, "the plan is for 8 GPUs"
    ),
    "a context longer than the model's": Mistake(
        "declare", lambda model: graph(model, generator={"max_context": 10**6}), GraphError, "reads at most"
    ),
    "numpy's numbers, which are no mistake, out of range": declared("group_size is a whole number", rollout={"group_size": np.int64(0)}),
}
CONFIGS = {
    "a file that is a list": Mistake("declare", config("- steps\n- 3\n"), ConfigError, "it holds a list"),
    "a file that is no YAML": Mistake("declare", config("steps: [1"), ConfigError, "it is no YAML"),
    "an unknown key": Mistake("declare", config("stpes: 3\n"), ConfigError, "the keys are ['steps']"),
    "a word for a number": Mistake("declare", config("steps: many\n"), ConfigError, "setting 'steps'"),
    "a file that is not there": made("there is no such file", lambda: rg.config(Settings, ["config=none.yaml"]), ConfigError),
    "no setting": made("write key=value", lambda: rg.config(Settings, ["fast"]), ConfigError),
}
MISTAKES: dict[str, Mistake] = {
    **MODELS,
    **POOLS,
    **SAMPLING,
    **OPTIMIZER,
    **NODES,
    **DATA,
    **REWARDS,
    **PLANS,
    **LAUNCH,
    **CONFIGS,
}
