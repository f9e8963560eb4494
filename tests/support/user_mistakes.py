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


def graph_mistake(words: str, error: type[Exception] = GraphError, **changed: Any) -> Mistake:
    return Mistake("declare", lambda model: graph(**changed), error, words)


def call_mistake(words: str, make: Callable[[], Any], error: type[Exception] = GraphError) -> Mistake:
    return Mistake("declare", lambda model: make(), error, words)


def compile_mistake(words: str, make: Callable[[], Any], error: type[Exception] = PlanError) -> Mistake:
    return Mistake("compile", lambda model: make(), error, words)


def launch_mistake(words: str, error: type[Exception] = DataError, *, settings: dict[str, Any] | None = None, **changed: Any) -> Mistake:
    def launch(model: Path) -> Any:
        return rg.compile(graph(model, **changed), rg.Cluster(cpus=2)).launch(**(settings or {}))

    return Mistake("launch", launch, error, words)


def reward_mistake(words: str, reward: Callable[..., Any], **changed: Any) -> Mistake:
    """A reward that goes wrong as it is called, in the one process of the oracle."""

    def run(model: Path) -> Any:
        with rg.compile(graph(model, reward=reward, **changed), rg.Cluster(cpus=2)).run_here() as job:
            return list(job.steps(1))

    return Mistake("run", run, RlgraphError, words)


def items_with(place: int, **fields: Any) -> list[dict[str, Any]]:
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
    return fakes.vector_loop(1, pools=(pool, pool), middle=lambda rollout: fakes.score_on_pool(pool, rollout))


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
    "a pool by name": graph_mistake("pool is a Pool; write pool=rg.Pool('rollout')", pool="rollout"),
    "a pool's class": graph_mistake("pool is a Pool; that is the class", pool=rg.Pool),
    "sampling as a dict": graph_mistake("write sampling=rg.Sampling(max_tokens=…)", sampling={"max_tokens": 8}),
    "sampling as a number": graph_mistake("sampling is a Sampling", sampling=8),
    "context as text": graph_mistake("write max_context=64, without quotes", generator={"max_context": "64"}),
    "no context": graph_mistake("a whole number of tokens, at least 2", generator={"max_context": 0}),
    "a context of a fraction": graph_mistake("max_context is a whole number", generator={"max_context": 64.5}),
    "an optimizer by name": graph_mistake("write optimizer=rg.AdamW(…)", policy={"optimizer": "adamw"}),
    "an optimizer's class": graph_mistake("that is the class: write optimizer=rg.AdamW()", policy={"optimizer": rg.AdamW}),
    "an optimizer of torch": graph_mistake("optimizer is an AdamW", policy={"optimizer": torch.optim.AdamW}),
    "a dtype of torch": graph_mistake("write dtype='float32'", policy={"dtype": torch.float32}),
    "a dtype by its short name": graph_mistake("write dtype='float32'", policy={"dtype": "fp32"}),
    "bf16": graph_mistake("write dtype='bfloat16'", generator={"dtype": "bf16"}),
    "a dtype that is none": graph_mistake("['auto', 'bfloat16', 'float32']", generator={"dtype": "int8"}),
    "no seed": graph_mistake("leave it out for 0", generator={"seed": None}),
    "a negative seed": graph_mistake("seed is a whole number of at least 0", generator={"seed": -1}),
    "a seed as text": graph_mistake("write seed=1, without quotes", generator={"seed": "1"}),
    "an unknown engine": call_mistake("['vllm', 'transformers', 'sglang']", lambda: rg.Generator("m", pool=pool(), engine="llama")),  # type: ignore[arg-type]
    "an engine misspelt": call_mistake("write engine='vllm'", lambda: rg.Generator("m", pool=pool(), engine="vLLM")),  # type: ignore[arg-type]
    "memory in percent": call_mistake("above 0 and below 1", lambda: rg.Generator("m", pool=pool(), memory=90)),
    "no engines": call_mistake(
        "tensor_parallel is a whole number of at least 1", lambda: rg.Generator("m", pool=pool(), tensor_parallel=0)
    ),
    "no model": call_mistake("path is a non-empty text", lambda: rg.Policy("", pool=pool())),
    "None as a model": call_mistake("Policy(path=None)", lambda: rg.Policy(None, pool=pool())),  # type: ignore[arg-type]
    "a micro-batch of nothing": graph_mistake("micro_batch_tokens is a whole number", policy={"micro_batch_tokens": 0}),
    "a flag as text": graph_mistake("write recompute=True", policy={"recompute": "true"}),
    "a flag as a number": graph_mistake("write recompute=True", policy={"recompute": 1}),
    "data parallel as text": graph_mistake("write data_parallel=2, without quotes", policy={"data_parallel": "2"}),
    "a critic's optimizer": call_mistake("write optimizer=rg.AdamW(…)", lambda: rg.Critic("m", pool=pool(), optimizer="sgd")),  # type: ignore[arg-type]
    "a reference that learns": call_mistake("optimizer", lambda: rg.Reference("m", pool=pool(), optimizer=rg.AdamW())),  # type: ignore[call-arg]
    "a label below 0": call_mistake("label is a whole number of at least 0", lambda: rg.RewardModel("m", pool=pool(), label=-1)),
}
POOLS = {
    "a pool without a name": call_mistake("name is a non-empty text", lambda: rg.Pool("")),
    "a share of 0": call_mistake("share is a positive number", lambda: rg.Pool("p", share=0)),
    "a share as text": call_mistake("write share=1, without quotes", lambda: rg.Pool("p", share="1")),  # type: ignore[arg-type]
    "no GPUs": call_mistake("an exact count", lambda: rg.Pool("p", gpus=0)),
    "GPUs and cores": call_mistake("a pool is of one kind", lambda: rg.Pool("p", gpus=1, cpus=1)),
    "a share and a count": call_mistake("set one of them", lambda: rg.Pool("p", share=2, gpus=1)),
}
SAMPLING = {
    "no tokens": call_mistake("max_tokens is a whole number of at least 1", lambda: rg.Sampling(max_tokens=0)),
    "a flag as tokens": call_mistake("max_tokens is a whole number", lambda: rg.Sampling(max_tokens=True)),
    "tokens as text": call_mistake("write max_tokens=8, without quotes", lambda: rg.Sampling(max_tokens="8")),  # type: ignore[arg-type]
    "tokens as a float": call_mistake("write max_tokens=8", lambda: rg.Sampling(max_tokens=8.0)),  # type: ignore[arg-type]
    "a negative temperature": call_mistake("at least 0, and 0 is greedy", lambda: rg.Sampling(temperature=-1)),
    "no temperature": call_mistake("leave it out for 1.0", lambda: rg.Sampling(temperature=None)),  # type: ignore[arg-type]
    "top_p in percent": call_mistake("at most 1, and 1 keeps all tokens", lambda: rg.Sampling(top_p=95)),
    "top_p of 0": call_mistake("Sampling(top_p=", lambda: rg.Sampling(top_p=0.0)),
    "top_k of -1": call_mistake("top_k is a whole number of at least 0", lambda: rg.Sampling(top_k=-1)),
    "a stop token as text": call_mistake("item 0 is '</s>'", lambda: rg.Sampling(stop_token_ids=("</s>",))),  # type: ignore[arg-type]
    "one stop token": call_mistake("write stop_token_ids=(2,)", lambda: rg.Sampling(stop_token_ids=2)),  # type: ignore[arg-type]
    "a stop token of numpy": call_mistake("a tuple, each a whole number", lambda: rg.Sampling(stop_token_ids=np.int64(2))),  # type: ignore[arg-type]
    "a stop token below 0": call_mistake("stop_token_ids", lambda: rg.Sampling(stop_token_ids=(-1,))),
    "min_p in percent": call_mistake("at most 1, and 0 keeps all tokens", lambda: rg.Sampling(min_p=5)),
    "one stop string": call_mistake("write stop=('</answer>',)", lambda: rg.Sampling(stop="</answer>")),  # type: ignore[arg-type]
    "an empty stop string": call_mistake("item 0 is ''", lambda: rg.Sampling(stop=("",))),
    "NaN as temperature": call_mistake("temperature is", lambda: rg.Sampling(temperature=float("nan"))),
}
OPTIMIZER = {
    "a learning rate of 0": call_mistake("a learning rate above 0", lambda: rg.AdamW(lr=0)),
    "a learning rate as text": call_mistake("write lr=1e-06, without quotes", lambda: rg.AdamW(lr="1e-6")),  # type: ignore[arg-type]
    "one beta": call_mistake("betas is a tuple of 2", lambda: rg.AdamW(betas=0.9)),  # type: ignore[arg-type]
    "three betas": call_mistake("it has 3", lambda: rg.AdamW(betas=(0.9, 0.9, 0.9))),  # type: ignore[arg-type]
    "a beta of 1": call_mistake("item 1 is 1.0", lambda: rg.AdamW(betas=(0.9, 1.0))),
    "an epsilon of 0": call_mistake("AdamW(eps=", lambda: rg.AdamW(eps=0.0)),
    "a negative weight decay": call_mistake("AdamW(weight_decay=", lambda: rg.AdamW(weight_decay=-1.0)),
    "no clipping": call_mistake("1e9 does not clip", lambda: rg.AdamW(grad_clip=0)),
    "no clipping, as None": call_mistake("1e9 does not clip", lambda: rg.AdamW(grad_clip=None)),  # type: ignore[arg-type]
    "half a step of warm-up": call_mistake("warmup_steps is a whole number", lambda: rg.AdamW(warmup_steps=0.5)),  # type: ignore[arg-type]
}
NODES = {
    "no groups": graph_mistake("group_size=0; group_size is a whole number of responses", rollout={"group_size": 0}),
    "groups as text": graph_mistake("write group_size=4, without quotes", rollout={"group_size": "4"}),
    "groups as a float": graph_mistake("write group_size=4", rollout={"group_size": 4.0}),
    "turns without tools": graph_mistake("no tools and no agent, so there is one turn", rollout={"max_turns": 2}),
    "tools that are none": graph_mistake("tools is a Tools", rollout={"tools": "python"}),
    "chunks that do not divide": graph_mistake("does not divide", rollout={"chunks": 3}),
    "an unknown interrupt": graph_mistake("['keep', 'recompute']", rollout={"interrupt": "drop"}),
    "refill of True": graph_mistake("pass the options of the refill", rollout={"refill": True}),
    "an edge by name": call_mistake(
        "pass what rlgraph.feedback(...) returned",
        lambda: rg.Generator("m", pool=pool()).rollout(rg.prompts(ITEMS, 1), "weights"),  # type: ignore[arg-type]
    ),
    "prompts that are a list": call_mistake("pass the output of another node", lambda: rg.Generator("m", pool=pool()).rollout(ITEMS)),  # type: ignore[arg-type]
    "a negative depth": call_mistake("how many weight versions", lambda: rg.feedback("w", depth=-1)),
    "a depth as text": call_mistake("write depth=1, without quotes", lambda: rg.feedback("w", depth="1")),  # type: ignore[arg-type]
    "a depth of True": call_mistake("how many weight versions", lambda: rg.feedback("w", depth=True)),
    "three buffers": call_mistake("so that it receives while it decodes", lambda: rg.feedback("w", depth=1, buffers=3)),
    "a second buffer of no use": call_mistake("nothing is decoded while weights arrive", lambda: rg.feedback("w", depth=0, buffers=2)),
    "the estimator by name": graph_mistake("pass an estimator object, e.g. estimator=rg.GRPO()", estimator="grpo"),
    "the estimator's class": graph_mistake("the class GRPO; pass an estimator object", estimator=rg.GRPO),
    "the loss by name": graph_mistake("pass a loss object, e.g. loss=rg.ClippedLoss()", loss="ppo"),
    "the loss's class": graph_mistake("the class ClippedLoss; pass a loss object", loss=rg.ClippedLoss),
    "no epochs": graph_mistake("epochs is a whole number of at least 1", update={"epochs": 0}),
    "mini-batches that do not divide": graph_mistake("must have equal sizes", update={"mini_batches": 3}),
    "guards as text": graph_mistake("write guards=rg.options.Guards(…)", update={"guards": "stop"}),
    "a warm-up without a critic": graph_mistake("no critic's values reach it", update={"critic_warmup": 2}),
    "an unknown argument": graph_mistake("unexpected keyword argument 'groups'", TypeError, rollout={"groups": 4}),
    "a graph of nothing": call_mistake("has no outputs", lambda: rg.Graph("g")),
    "a graph without a name": call_mistake("Graph(name=the batch of 'prompts')", lambda: rg.Graph(rg.prompts(ITEMS, 1))),  # type: ignore[arg-type]
    "two updates of one policy": call_mistake("'update' and 'again' both update one policy", two_updates),
    "a stale loop in one pool": call_mistake("nothing can overlap", stale_in_one_pool),
    "clipping in percent": call_mistake("clip_low is a finite number of at least 0 and at most 1", lambda: rg.ClippedLoss(clip_low=20)),
    "gamma above 1": call_mistake("gamma is", lambda: rg.GAE(gamma=1.5)),
    "an unknown aggregation": call_mistake("token-mean", lambda: rg.ClippedLoss(aggregation="mean")),
    "a misspelt aggregation": call_mistake("write aggregation='token-mean'", lambda: rg.ClippedLoss(aggregation="token_mean")),
    "an unknown estimator": call_mistake("there is no estimator 'grop'", lambda: alg.estimator("grop")),
    "a KL of -1": call_mistake("at least 0", lambda: rg.ClippedLoss(kl_coef=-1)),
    "a weight's class": call_mistake("that is the class: write weights=", lambda: alg.RolloutCorrection(rg.estimators.TruncatedIS)),  # type: ignore[arg-type]
    "guards that shrug": call_mistake("['skip', 'stop']", lambda: rg.options.Guards(nonfinite="ignore")),  # type: ignore[arg-type]
    "no patience": call_mistake("skipped steps, at least 1", lambda: rg.options.Guards(patience=0)),
    "no tool": call_mistake("has no tool", lambda: rg.Tools([])),
    "a tool that is not async": call_mistake("an async function", lambda: rg.Tools([right])),  # type: ignore[list-item]
    "no time for a tool": call_mistake("a number of seconds above 0", lambda: rg.Tools([rg.tools.calculator], deadline_s=0)),
}
DATA = {
    "no items": graph_mistake("the data set is empty", DataError, data=[]),
    "a dict of lists": graph_mistake("for row in zip(*data.values())", DataError, data={"prompt": ["a"], "answer": ["b"]}),
    "a path": graph_mistake("read the file first", DataError, data="train.jsonl"),
    "a generator": graph_mistake("pass list(...) of it", DataError, data=(item for item in ITEMS)),
    "texts": graph_mistake("[{'prompt': text} for text in data]", DataError, data=["1 + 1 ="]),
    "another field": graph_mistake("pass the name of that field as prompt=", DataError, data=[{"question": "1 + 1 ="}]),
    "bytes": graph_mistake("decode it", DataError, data=[{"prompt": b"1 + 1 ="}]),
    "None as a prompt": graph_mistake("item 0 of the data set has prompt=None", DataError, data=items_with(0, prompt=None)),
    "a field of lists": graph_mistake("json.dumps(value)", DataError, data=[{"prompt": "a", "answer": [1]}]),
    "two fields of one column": graph_mistake(
        "both become the column 'answers'", DataError, data=[{"prompt": "a", "answer": "b", "answers": "c"}]
    ),
    "no prompts a step": graph_mistake("the number of prompts per step", DataError, prompts={"count": 0}),
    "prompts a step as text": graph_mistake("write count=2, without quotes", DataError, prompts={"count": "2"}),
    "data without a seed": graph_mistake("leave it out for 0", DataError, prompts={"seed": None}),
    "a field that a later row lacks": launch_mistake("item 5 of the data set lacks the field 'answer'", data=items_with(5, answer=...)),
    "a prompt that a later row lacks": launch_mistake("item 5 of the data set lacks the field 'prompt'", data=items_with(5, prompt=...)),
    "None in a later row": launch_mistake("item 6 of the data set has answer=None", data=items_with(6, answer=None)),
    "None as a later prompt": launch_mistake("item 3 of the data set has prompt=None", data=items_with(3, prompt=None)),
    "another type in a later row": launch_mistake("item 4 of the data set has answer=7, a whole number", data=items_with(4, answer=7)),
    "messages in a later row": launch_mistake("these are messages", data=items_with(2, prompt=[{"role": "user", "content": "hi"}])),
    "bytes in a later row": launch_mistake(
        "item 2 of the data set has prompt=b'1'; a prompt is text: decode it", data=items_with(2, prompt=b"1")
    ),
    "a later row that is no mapping": launch_mistake("item 7 of the data set is 'x'", data=[*ITEMS[:7], "x"]),
    "an empty prompt": launch_mistake("the prompt of item 2 of the data set has 0 tokens", data=items_with(2, prompt="")),
    "a prompt too long": launch_mistake("the prompt of item 2 of the data set has", data=items_with(2, prompt="1 + " * 2000)),
}
REWARDS = {
    "no function": graph_mistake("a function that returns one number per response", reward="exact"),
    "a column that is not there": graph_mistake("reads column 'solutions'", reward=lambda solutions: [0.0]),
    "any columns": graph_mistake("name the columns that it reads instead of **", reward=trl),
    "positional": graph_mistake("name the columns it reads", reward=lambda *columns: [0.0]),
    "a built-in": graph_mistake("name the columns it reads", reward=len),
    "verl's without its source": graph_mistake("reads column 'data_sources'", reward=scored),
    "concurrency of 0": graph_mistake("how many responses are scored at a time", rewarding={"concurrency": 0}),
    "no deadline": graph_mistake("deadline_s is a number of seconds above 0", rewarding={"deadline_s": 0}),
    "outliers of 0": graph_mistake("standard deviations above 0", rewarding={"outliers": 0}),
    "a column of another kind": graph_mistake(
        "a reward is one number per response: choose another name", rewarding={"writes": "responses"}
    ),
    "a column without a name": graph_mistake("the name of the column", rewarding={"writes": ""}),
    "a lock": launch_mistake("function 'locked' cannot be sent to a worker: its 'lock' is a lock", GraphError, reward=holding()),
    "a lock in a partial": launch_mistake("its 'lock' is a lock", GraphError, reward=partial(held, lock=LOCK)),
    "a call that raises": reward_mistake("raised KeyError: 'gold', for the batch of 4 responses, and for each of them alone", broken),
    "one response that raises": reward_mistake("raised ValueError: three, for response", picky, prompts={"count": 8}),
    "beyond float32": reward_mistake("a reward must fit in float32", lambda responses: [1e39] * len(responses)),
    "a number as text": reward_mistake("returned '1.0' for response 0", lambda responses: ["1.0"] * len(responses)),
    "NaN as a reward": reward_mistake("returned nan for response 0", lambda responses: [float("nan")] * len(responses)),
    "None as a reward": reward_mistake("returned None for response 0", lambda response: None),
    "too few rewards": reward_mistake("returned 1 rewards for 4 responses", lambda responses: [0.0]),
    "one number for all": reward_mistake("returned float; it returns one number per response", lambda responses: 0.0),
}
PLANS = {
    "a cluster by count": compile_mistake("cluster is a Cluster", lambda: rg.compile(graph(), 2)),  # type: ignore[arg-type]
    "no graph": compile_mistake("pass a graph", lambda: rg.compile("g", rg.Cluster())),  # type: ignore[arg-type]
    "costs as a dict": compile_mistake(
        "write costs=rg.planning.Costs(rollout=…)", lambda: rg.compile(graph(), rg.Cluster(), {"rollout": 1.0})
    ),  # type: ignore[arg-type]
    "costs of another node": compile_mistake("", lambda: rg.compile(graph(), rg.Cluster(), rg.planning.Costs({"roll": 1.0}))),
    "GPUs as text": compile_mistake("write gpus=8, without quotes", lambda: rg.Cluster(gpus="8")),  # type: ignore[arg-type]
    "no cores": compile_mistake("cpus is a whole number of at least 1", lambda: rg.Cluster(cpus=0)),
    "a negative cost": compile_mistake("the cost of 'rollout' is -1.0", lambda: rg.planning.Costs({"rollout": -1.0})),
    "a cost as text": compile_mistake("the cost of 'rollout' is '1'", lambda: rg.planning.Costs({"rollout": "1"})),  # type: ignore[dict-item]
    "groups of one": compile_mistake(
        "(group_size=1), which leaves no baseline",
        lambda: rg.compile(graph(rollout={"group_size": 1}), rg.Cluster()),
        rg.errors.PlanWarning,
    ),
    "greedy groups": compile_mistake(
        "temperature=0, so that all responses of a group are the same",
        lambda: rg.compile(graph(sampling=rg.Sampling(max_tokens=4, temperature=0), loss=alg.Reinforce()), rg.Cluster()),
        rg.errors.PlanWarning,
    ),
    "an unknown key of a plan": compile_mistake(
        "plan.speed means nothing here", plan_json(lambda text: text.replace("{", '{"speed": 1,', 1))
    ),
    "a key of a plan that is missing": compile_mistake("this is rlgraph", plan_json(lambda text: text.replace('"graph"', '"grahp"', 1))),
    "no plan": compile_mistake("this is rlgraph", lambda: rg.Plan.from_json("[]")),
    "no JSON": compile_mistake("this is rlgraph", lambda: rg.Plan.from_json("plan")),
    "another picture": compile_mistake(".svg or .mmd", lambda: rg.compile(graph(), rg.Cluster()).draw("plan.png")),
    "an unknown objective": compile_mistake("by is one of", lambda: rg.tune(graph, rg.Cluster(), by="speed")),  # type: ignore[arg-type]
    "a setting without values": compile_mistake("pass the values to try", lambda: rg.tune(graph, rg.Cluster(), depth=())),
    "steps as text": Mistake(
        "run",
        lambda model: rg.compile(graph(model), rg.Cluster()).run_here().steps("3"),  # type: ignore[arg-type]
        PlanError,
        "write count=3, without quotes",
    ),
}
LAUNCH = {
    "a model that is not there": launch_mistake("no such folder", generator_path="nowhere"),
    "a model that is a file": launch_mistake("no such folder", generator_path=__file__),
    "a stop token outside of the vocabulary": launch_mistake("vocabulary", sampling=rg.Sampling(max_tokens=4, stop_token_ids=(10**6,))),
    "no room for a prompt": launch_mistake("lower max_tokens", sampling=rg.Sampling(max_tokens=10**5)),
    "an unknown dispatch": launch_mistake("dispatch is one of", PlanError, settings={"dispatch": "threads"}),
    "no time": launch_mistake("a number of seconds above 0", PlanError, settings={"deadline_s": 0}),
    "every without a checkpoint": launch_mistake("pass checkpoint=", PlanError, settings={"every": 2}),
    "every 0 steps": launch_mistake("every is a whole number", PlanError, settings={"checkpoint": "c", "every": 0}),
    "restarts as text": launch_mistake("write restarts=2, without quotes", PlanError, settings={"checkpoint": "c", "restarts": "2"}),
    "a checkpoint that is no path": launch_mistake("checkpoint is text", PlanError, settings={"checkpoint": 3}),
    "more GPUs than there are": Mistake(
        "launch", lambda model: rg.compile(graph(model), rg.Cluster(gpus=8)).launch(), PlanError, "the plan is for 8 GPUs"
    ),
    "a context longer than the model's": Mistake(
        "declare", lambda model: graph(model, generator={"max_context": 10**6}), GraphError, "reads at most"
    ),
    "numpy's numbers, which are no mistake, out of range": graph_mistake(
        "group_size is a whole number", rollout={"group_size": np.int64(0)}
    ),
}
CONFIGS = {
    "a file that is a list": Mistake("declare", config("- steps\n- 3\n"), ConfigError, "it holds a list"),
    "a file that is no YAML": Mistake("declare", config("steps: [1"), ConfigError, "the file is not valid YAML"),
    "an unknown key": Mistake("declare", config("stpes: 3\n"), ConfigError, "the keys are ['steps']"),
    "a word for a number": Mistake("declare", config("steps: many\n"), ConfigError, "setting 'steps'"),
    "a file that is not there": call_mistake("there is no such file", lambda: rg.config(Settings, ["config=none.yaml"]), ConfigError),
    "no setting": call_mistake("write key=value", lambda: rg.config(Settings, ["fast"]), ConfigError),
}
ASKED = {"role": "user", "content": "hi"}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{1, 2}"}}]}


def conversation_items(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Items of one conversation, whose messages these are."""
    return [{"prompt": list(messages), "answer": "2"}]


CHATS = {
    "a message without a role": graph_mistake("names its role", DataError, data=conversation_items({"content": "1 + 1 ="})),
    "a message without content": graph_mistake("'content'", DataError, data=conversation_items({"role": "user"})),
    "a video in a message": graph_mistake(
        "content is text", DataError, data=conversation_items({"role": "user", "content": [{"type": "video"}]})
    ),
    "arguments that are no JSON": graph_mistake("which is not JSON", DataError, data=conversation_items(CALLING)),
    "a conversation that is answered": graph_mistake(
        "leave that message out", DataError, data=conversation_items(ASKED, {"role": "assistant", "content": "hello"})
    ),
    "no messages": graph_mistake(
        "a prompt is text, or a list of messages", DataError, data=conversation_items(), prompts={"chat": rg.options.Chat()}
    ),
    "thinking given twice": call_mistake(
        "given twice", lambda: rg.options.Chat(enable_thinking=True, template_kwargs={"enable_thinking": False}), DataError
    ),
    "a tool that is a function": call_mistake("tools", lambda: rg.options.Chat(tools=(print,)), DataError),  # type: ignore[arg-type]
    "an argument of a template that is no JSON": call_mistake("JSON", lambda: rg.options.Chat(template_kwargs={"day": print}), DataError),
    "a conversation for a model without a template": launch_mistake("has no chat template", data=conversation_items(ASKED)),
    "text for a model without a template": launch_mistake("has no chat template", prompts={"chat": rg.options.Chat(system="Be brief.")}),
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
    **CHATS,
}
