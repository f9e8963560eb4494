"""Mistakes that users make with examples, pairs, teachers and reward models. Read by `test_mistakes.py`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.user_mistakes import Mistake, call_mistake

import rlgraph as rg
from rlgraph.errors import DataError, GraphError, PlanError

PAIRS = [{"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": f" {a}"} for a in range(4)]
LABELS = [{"prompt": f"{a} + 1 =", "completion": f" {a + 1}", "good": True} for a in range(4)]


def policy(model: Path | str = "m") -> rg.Policy:
    return rg.Policy(str(model), pool=rg.Pool("train"))


def judge(model: Path | str = "m") -> rg.LearnedReward:
    return rg.LearnedReward(str(model), pool=rg.Pool("judge"))


def pairs(*rows: dict[str, Any], **settings: Any) -> Any:
    return rg.pairs([*PAIRS, *rows], 2, policy(), **settings)


def labels(mismatched: bool = False) -> Any:
    return rg.examples(LABELS, 2, policy(), label="good", mismatched=mismatched)


def update_by_reference(source: Any, **settings: Any) -> Any:
    return policy().update(source, rg.Reference("m", pool=rg.Pool("reference")).log_probs(source), **settings)


def launch_mistake(words: str, metrics: Callable[[Path], Any], error: type[Exception] = DataError) -> Mistake:
    return Mistake("launch", lambda model: rg.compile(rg.Graph("g", metrics(model)), rg.Cluster(cpus=2)).launch(), error, words)


def train_on_pairs(model: Path, rows: list[dict[str, Any]]) -> Any:
    own = policy(model)
    return own.update(rg.pairs(rows, 2, own), loss=rg.losses.SimPO()).metrics


def other_vocabulary(model: Path) -> str:
    """Copy a model, with two tokens that change places in its tokenizer."""
    folder = model.parent / "other"
    if not folder.exists():
        shutil.copytree(model, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        known = tokenizer["model"]["vocab"]
        first, second = list(known)[40:42]
        known[first], known[second] = known[second], known[first]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def distillation_graph(model: Path, prompts: Any, scored: Callable[[Any], Any]) -> Any:
    """A graph that distils a rollout by the scores that are given for it."""
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=rg.Sampling(max_tokens=4))
    weights = rg.feedback("weights", depth=0)
    rollout = generator.rollout(prompts, weights, group_size=2)
    step = policy(model).update(rollout, scored(rollout), loss=rg.losses.DistillationLoss())
    weights.close(step.weights)
    return step.metrics


def distil_other_vocabulary(model: Path) -> Any:
    teacher = rg.Teacher(other_vocabulary(model), pool=rg.Pool("teacher"))
    return distillation_graph(model, rg.prompts([{"prompt": "1 ="}], count=2), lambda rollout: teacher.top_log_probs(rollout, top_k=4))


def distil_unknown_source(model: Path) -> Any:
    teachers = {name: rg.Teacher(str(model), pool=rg.Pool(name)) for name in ("maths", "code")}
    prompts = rg.prompts([{"prompt": "1 =", "data_source": name} for name in ("maths", "history")], count=2)
    return distillation_graph(model, prompts, lambda rollout: rg.options.by_source(prompts, rollout, teachers=teachers, top_k=4))


def score_by_untrained_judge(model: Path) -> Any:
    return judge(model).rewards(rg.pairs(PAIRS, 2, policy(model)))


def cache_in_file(model: Path) -> Any:
    (model.parent / "file").write_text("")
    source = rg.pairs(PAIRS, 2, policy(model))
    return rg.Reference(str(model), pool=rg.Pool("r"), dtype="float32").log_probs(source, cache=model.parent / "file")


def train_two_policies(model: Path) -> Any:
    def first() -> rg.Graph:
        each = [(own, rg.pairs(PAIRS, 2, own, name=f"{n} pairs")) for n, own in enumerate((policy(model), policy(model)))]
        return rg.Graph("first", *(own.update(s, loss=rg.losses.SimPO(), name=f"{n} update").metrics for n, (own, s) in enumerate(each)))

    return rg.run([first, lambda first: first], model.parent / "run", steps=[1, 1], cluster=rg.Cluster(cpus=2))


EQUAL = {"prompt": "1 =", "chosen": " 2", "rejected": " 2"}
SPLIT = {"prompt": "1 =", "completions": ["2\n3"], "labels": [True]}
SOLUTION = {"prompt": "1 =", "completions": ["2"], "labels": [True]}

MISTAKES = {
    "a pair of equal answers": call_mistake(
        "they are equal, so there is nothing to learn", lambda: rg.pairs([EQUAL], 1, policy()), DataError
    ),
    "a later pair of equal answers": launch_mistake(
        "item 4 of the data set has chosen and rejected", lambda m: train_on_pairs(m, [*PAIRS, EQUAL])
    ),
    "no pair a step": call_mistake("count is how many rows of the data a step takes", lambda: rg.pairs(PAIRS, 0, policy()), DataError),
    "no solution a step": call_mistake(
        "count is how many rows of the data a step takes", lambda: rg.stages.stepwise([SPLIT], 0, judge()), DataError
    ),
    "a margin that is no number": call_mistake(
        "a finite number", lambda: rg.pairs([{**PAIRS[0], "by": float("nan")}], 1, policy(), margin="by"), DataError
    ),
    "a step with its separator": call_mistake("would end a step", lambda: rg.stages.stepwise([SPLIT], 1, judge()), DataError),
    "a loss of pairs for labels": call_mistake("'examples' writes single rows", lambda: policy().update(labels(), loss=rg.losses.SimPO())),
    "KTO for pairs": call_mistake("'pairs' writes pairs", lambda: update_by_reference(pairs(), loss=rg.losses.KTO())),
    "KTO without mismatched rows": call_mistake("mismatched=True", lambda: update_by_reference(labels(), loss=rg.losses.KTO())),
    "mini-batches that part pairs": call_mistake(
        "choose a divisor of 2", lambda: policy().update(pairs(), loss=rg.losses.SimPO(), mini_batches=4)
    ),
    "a further loss of pairs for labels": call_mistake(
        "'examples' writes single rows", lambda: policy().update(pairs(), loss=rg.losses.SimPO(), also=[(labels(), rg.losses.SimPO(), 1.0)])
    ),
    "a policy's loss for a reward model": call_mistake(
        "the log-probs of a policy", lambda: judge().update(pairs(), loss=rg.losses.SimPO())
    ),
    "a reward model's loss for a policy": call_mistake("rg.DPO()", lambda: policy().update(pairs(), loss=rg.losses.BradleyTerry())),
    "a loss of steps for a policy": call_mistake(
        "the rewards of a rg.LearnedReward",
        lambda: policy().update(rg.stages.stepwise([SOLUTION], 1, judge()), loss=rg.losses.StepwiseLoss()),
    ),
    "a negative weight of a further batch": call_mistake(
        "a finite number above 0", lambda: policy().update(pairs(), loss=rg.losses.SimPO(), also=[(pairs(), rg.losses.SimPO(), -0.1)])
    ),
    "a teacher of another vocabulary": launch_mistake("use models with the same vocabulary", distil_other_vocabulary),
    "examples in the tokens of another model": launch_mistake(
        "use models with the same vocabulary",
        lambda m: policy(other_vocabulary(m)).update(rg.pairs(PAIRS, 2, policy(m)), loss=rg.losses.SimPO()).metrics,
    ),
    "a source without a teacher": launch_mistake("item 1 of 'prompts' has the data_source 'history'", distil_unknown_source, GraphError),
    "rewards by a model that learnt none": launch_mistake("all rewards would be 0", score_by_untrained_judge),
    "a cache that is a file": launch_mistake("is a file; pass a folder", cache_in_file),
    "weights of two models to hand on": Mistake(
        "launch", train_two_policies, PlanError, "later graphs receive the weights of only one model"
    ),
    "a curriculum's folder that is a file": call_mistake(
        "it is a file", lambda: rg.run([rg.Graph("g", rg.prompts([{"prompt": "1"}], 1))], __file__, steps=[1]), PlanError
    ),
}
