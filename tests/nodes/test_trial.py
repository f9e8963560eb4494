"""What a user's functions return is found at the launch, on a made-up batch: node, finding, rule and fix, before anything starts."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.user_mistakes import graph

import rlgraph as rg
from rlgraph import notices
from rlgraph.columns import Columns
from rlgraph.errors import RlgraphError
from rlgraph.nodes import trial
from rlgraph.nodes.trial import try_functions

REWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda responses: None, "node 'reward': reward function <lambda> returned NoneType"),
    "text": (lambda response: "good", "returned 'good' for response 0 (prompt 0 of the data order: '0 + 1 =')"),
    "NaN": (lambda response, answer: float("nan"), "a reward is a finite number"),
    "an unknown name": (lambda response: responses, "raised NameError: name 'responses' is not defined"),  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_goes_wrong_is_found_before_the_launch(name: str) -> None:
    function, words = REWARDS[name]
    with pytest.raises(RlgraphError) as caught:
        try_functions(graph(reward=function))
    assert words in str(caught.value)
    assert "trial=False" in str(caught.value)
    try_functions(graph(reward=function, rewarding={"trial": False}))


def test_an_error_that_real_texts_may_not_cause_is_a_notice() -> None:
    answers = {"0 + 1 =": "1"}
    try_functions(graph(reward=lambda response: answers[response]))
    said = "node 'reward': its function raised KeyError: '2 + 2 = 4, so the answer is 4.' on a made-up batch"
    assert any(text.startswith(said) for text in notices.here.list_all())


NODES: dict[str, tuple[Callable[[Columns], Any], str]] = {
    "nothing": (lambda batch: None, "node 'mine' returned None; it returns its columns by name"),
    "a float mask": (
        lambda batch: {"loss_mask": batch["response_mask"].float()},  # type: ignore[union-attr]
        "node 'mine' returned loss_mask as a tensor [4, 5] of float32; this column is a tensor [B, T] of bool",
    ),
    "a list of numbers": (lambda batch: {"loss_mask": [1, 2, 3, 4]}, "a column is a tensor of one row each, or a list of texts"),
    "an undeclared column": (
        lambda batch: {"loss_mask": batch["responses"] > 0},  # type: ignore[operator]
        "node 'mine': the function reads column 'responses', but its node reads ['response_mask']: add the column to reads=",
    ),
    "too few rows": (lambda batch: {"loss_mask": batch["response_mask"][:1]}, "returned 1 rows, but the batch has 4"),
}


def masked(function: Callable[[Columns], Any], **settings: Any) -> rg.Graph:
    mask = rg.node(reads="response_mask", writes="loss_mask", **settings)(function)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 ="}], 3), group_size=2)
    return rg.Graph("g", mask(rollout, name="mine"))


@pytest.mark.parametrize("name", NODES)
def test_a_node_that_goes_wrong_is_found_before_the_launch(name: str) -> None:
    function, words = NODES[name]
    with pytest.raises(RlgraphError) as caught:
        try_functions(masked(function))
    assert words in str(caught.value)
    try_functions(masked(function, trial=False))


def test_a_made_up_batch_has_fields_of_the_data_and_leaves_states_and_random_numbers_alone() -> None:
    seen: list[Columns] = []

    class Counting:
        calls = 0

        def __call__(self, responses: list[str], answers: list[str], prompt_texts: list[str]) -> list[float]:
            self.calls += 1
            seen.append({"answers": answers, "prompt_texts": prompt_texts, "responses": responses})
            return [torch.rand(1).item() for _ in responses]

    counting = Counting()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    try_functions(graph(reward=counting))
    assert (torch.rand(1), counting.calls) == (expected, 0)
    assert seen[0]["answers"] == ["1", "1", "2", "2"]
    assert seen[0]["prompt_texts"] == ["0 + 1 =", "0 + 1 =", "1 + 1 =", "1 + 1 ="]
    assert all(isinstance(text, str) and text for text in seen[0]["responses"])


def test_a_slow_function_is_left_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 0.05)
    monkeypatch.setattr("rlgraph.nodes.rewards.scoring.LIMIT_S", 0.05)
    end = threading.Event()
    try_functions(graph(reward=lambda response: float(end.wait(30))))
    end.set()
    assert any("has not returned within 0.05 s, so it is not tried before the launch" in text for text in notices.here.list_all())


def test_the_reward_of_an_evaluation_is_tried_too() -> None:
    generator, weights = rg.Generator("m", pool=rg.Pool("rollout")), rg.feedback("weights", depth=1)
    found = rg.evaluate(generator, [{"prompt": "1 =", "answer": "1"}], weights, reward=lambda answers, responses: answers, every=1)
    with pytest.raises(RlgraphError, match="reward function <lambda> returned '1' for response 0"):
        found.node.operation.trial(found.node, trial.made_up(found.node.reads, 2), 2)


def test_functions_are_tried_before_a_job_is_made() -> None:
    node = rg.node(reads="prompt_ids", writes="rewards")(lambda batch: None)  # type: ignore[arg-type,return-value]
    plan = rg.compile(rg.Graph("g", node(rg.prompts([{"prompt": "1"}], 1), name="mine")), rg.Cluster(cpus=1))
    for start in (plan.run_here, plan.launch):
        with pytest.raises(RlgraphError, match=r"node 'mine' returned None.*found on a made-up batch"):
            start()


class Own:
    """An estimator of the user."""

    reads, writes = ("rewards", "response_mask"), ("advantages",)

    def __init__(self, function: Callable[[Columns], Any]) -> None:
        self.function = function

    def __call__(self, batch: Columns) -> Any:
        return self.function(batch)


class Stage(rg.extend.Operation):
    """An operation of the user."""

    def __init__(self, function: Callable[[Columns], Any], trial: bool = True) -> None:
        self.function, self.trial_allowed = function, trial

    @property
    def traits(self) -> rg.extend.NodeTraits:
        return rg.extend.NodeTraits(trial=self.trial_allowed)

    def start(self, context: Any) -> Any:
        return lambda step, columns: self.function(columns)


def spread_out(batch: Any) -> torch.Tensor:
    return batch["rewards"][:, None].expand(batch["response_mask"].shape)  # type: ignore[no-any-return]


def standardised(batch: Any) -> Columns:
    """Divide by the deviation of each group of two, which is 0 where both score the same."""
    groups = spread_out(batch).reshape(2, 2, -1)
    return {"advantages": ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).reshape(4, -1)}


ADVANTAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda batch: None, "node 'mine' returned None; it returns its columns by name"),
    "text": (lambda batch: {"advantages": "high"}, "node 'mine' returned advantages='high'; a column is a tensor"),
    "NaN": (lambda batch: {"advantages": spread_out(batch) / 0}, "node 'mine' returned advantages with NaN or an infinity"),
    "a mask": (
        lambda batch: {"advantages": batch["response_mask"]},
        "as a tensor [4, 5] of bool; this column is a tensor [B, T] of float32",
    ),
    "an undeclared column": (lambda batch: {"advantages": batch["values"]}, "reads column 'values', but its node reads ['rewards', "),
}


def advantaged(function: Callable[[Columns], Any], kind: str, trial: bool = True) -> rg.Graph:
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 ="}], 3), group_size=2)
    rewards = rg.reward(lambda response: 0.0, rollout, trial=False)
    if kind == "estimator":
        return rg.Graph("g", rg.advantages(rollout, rewards, estimator=Own(function), name="mine", trial=trial))
    return rg.Graph("g", rg.extend.declare("mine", Stage(function, trial), [rollout, rewards], reads=Own.reads, writes=Own.writes).batch)


@pytest.mark.parametrize("kind", ["estimator", "operation"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_and_an_operation_that_go_wrong_are_found_before_the_launch(name: str, kind: str) -> None:
    function, words = ADVANTAGES[name]
    with pytest.raises(RlgraphError) as caught:
        try_functions(advantaged(function, kind))
    assert words in str(caught.value)
    assert ("trial=False" if kind == "estimator" else "traits = rg.extend.NodeTraits(trial=False)") in str(caught.value)
    try_functions(advantaged(function, kind, trial=False))
    try_functions(advantaged(standardised, kind))


def test_what_works_in_a_run_passes_the_trial() -> None:
    """Also what divides by the spread of the rewards where all made-up texts score the same, and what chooses a fixed number of rows."""
    generator = rg.Generator("m", pool=rg.Pool("rollout"))
    rollout = generator.rollout(rg.prompts([{"prompt": "1 ="}] * 9, 6), group_size=2)
    rewards = rg.reward(lambda response: 1.0, rollout)
    reads = ("rewards", "response_mask")
    estimated = rg.extend.declare("own", Stage(standardised), [rollout, rewards], reads=reads, writes=("advantages",)).batch
    chosen = rg.extend.declare(
        "best", Stage(lambda batch: {"rewards": batch["rewards"][:6]}), [rewards], reads=("rewards",), writes=("rewards",), rows=6
    )
    source = rg.extend.declare("source", Stage(lambda batch: {"marks": torch.zeros(6)}), [], reads=(), writes=("marks",), rows=6)
    counted = rg.extend.declare(
        "counted", Stage(lambda batch: {"seen": batch["marks"]}), [source.batch], reads=("marks",), writes=("seen",)
    )
    try_functions(rg.Graph("g", estimated, chosen.batch, counted.batch))
    wrong = rg.extend.declare("source", Stage(lambda batch: {"marks": torch.zeros(5)}), [], reads=(), writes=("marks",), rows=6)
    with pytest.raises(RlgraphError, match="node 'source' returned 5 rows, but the batch has 6"):
        try_functions(rg.Graph("g", wrong.batch))


def test_weights_and_changes_of_rewards_of_the_user_are_tried_too() -> None:
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 ="}], 3), group_size=2)
    policy, rewards = rg.Policy("m", pool=rg.Pool("train")), rg.reward(lambda response: 1.0, rollout)
    weighed = rg.stages.rollout_correction(rollout, policy.log_probs(rollout), weights=lambda old, engine, mask: mask)
    shaped = rg.stages.shaped_rewards(rollout, rewards, by=Own(lambda batch: {"rewards": batch["rewards"][:1]}))
    for output, words in (
        (weighed, "node 'correction' returned rollout_is_weights as a tensor [4, 5] of bool"),
        (shaped, "1 rows, but the batch has 4"),
    ):
        with pytest.raises(RlgraphError, match=words.replace("[", r"\[")):
            try_functions(rg.Graph("g", output))


class Loss:
    """A loss of the user."""

    reads, needs_entropy = ("advantages", "old_log_probs"), False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, log_probs: torch.Tensor, batch: Columns, totals: Any, entropy: torch.Tensor | None) -> Any:
        return self.function(log_probs, batch, totals)


def surrogate(log_probs: Any, batch: Any) -> torch.Tensor:
    return ((log_probs - batch["old_log_probs"]).exp() * batch["advantages"])[batch["response_mask"]]  # type: ignore[no-any-return]


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda *_: None, "node 'update': its loss 'Loss' returned None; it returns its value and its metrics"),
    "no metrics": (
        lambda p, batch, totals: surrogate(p, batch).sum().detach(),
        "; it returns its value and its metrics",
    ),
    "a loss of each token": (lambda p, batch, totals: (surrogate(p, batch), {}), "as its value; it must be a tensor of one number"),
    "a plain number": (lambda p, batch, totals: (surrogate(p, batch).sum().item(), {}), "as its value; it must be a tensor of one number"),
    "no gradient": (lambda p, batch, totals: (surrogate(p.detach(), batch).sum(), {}), "has no gradient; compute it from the log-probs"),
    "NaN": (lambda p, batch, totals: (surrogate(p, batch).sum() * 0 / 0, {}), "is nan, or its gradient is not finite"),
    "NaN in padding": (lambda p, batch, totals: ((surrogate(p, batch).sum() + (1 - p.exp()).log().sum()), {}), "leave out the tokens"),
    "a metric that is a tensor": (lambda p, batch, totals: (surrogate(p, batch).sum(), {"a": p}), "returned the metric 'a' as Tensor"),
    "an undeclared column": (
        lambda p, batch, totals: ((p * batch["ref_log_probs"]).sum(), {}),
        "reads column 'ref_log_probs', but its node reads ['prompts', 'prompt_mask', ",
    ),
    "an unknown name": (lambda p, batch, totals: (undefined, {}), "its loss 'Loss' raised NameError"),  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_goes_wrong_is_found_before_the_launch(name: str) -> None:
    function, words = LOSSES[name]
    with pytest.raises(RlgraphError) as caught:
        try_functions(graph(loss=Loss(function)))
    assert words in str(caught.value)
    assert "(found on a made-up batch; trial=False leaves that out)" in str(caught.value)
    try_functions(graph(loss=Loss(function), update={"trial": False}))


class Pairs(rg.losses.WholeLoss):
    """A loss that compares the rows of the mini-batch."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences",)

    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        better, worse = (scores.sum(-1)[batch["preferences"] == sign].mean() for sign in (1, -1))  # type: ignore[index]
        return -torch.nn.functional.logsigmoid(better - worse), {}


def test_losses_that_work_in_a_run_pass_the_trial() -> None:
    notices.here.forget()

    def optional(log_probs: torch.Tensor, batch: Any, totals: Any) -> Any:
        try:
            weights = batch["rollout_is_weights"]
        except KeyError:
            weights = batch.get("no such column", 1.0)
        scaled = batch["advantages"] / batch["advantages"].abs()  # NaN where all are 0, as those of made-up rewards may be
        return (log_probs * scaled * weights)[batch["response_mask"]].sum() / totals.tokens, {"mine/size": 1}

    try_functions(graph(loss=Loss(optional), reward=lambda response: 1.0))
    try_functions(graph(loss=rg.ClippedLoss(entropy_coef=0.1)))
    critic = rg.Critic("m", pool=rg.Pool("train"))
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 ="}], 3), group_size=2)
    rewards = rg.reward(lambda response: 1.0, rollout)
    advantages = rg.advantages(rollout, rewards, critic.values(rollout), estimator=rg.GAE())

    class Squared:
        reads, needs_entropy = ("returns",), False

        def __call__(self, values: torch.Tensor, batch: Any, totals: Any) -> Any:
            return ((values - batch["returns"]) ** 2)[batch["response_mask"]].sum() / totals.tokens, {}

    try_functions(rg.Graph("g", critic.update(rollout, advantages, loss=Squared()).metrics))
    judge = rg.LearnedReward("m", pool=rg.Pool("train"))
    policy = rg.Policy("m", pool=rg.Pool("train"))
    for model in (judge, policy):
        pairs = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, model)
        try_functions(rg.Graph("g", model.update(pairs, loss=Pairs()).metrics))
    assert not [text for text in notices.here.list_all() if "made-up" in text]


def test_a_loss_whose_micro_batches_do_not_add_up_is_a_notice() -> None:
    """It trains otherwise with each `micro_batch_tokens`."""
    notices.here.forget()
    try_functions(graph(loss=Loss(lambda p, batch, totals: (surrogate(p, batch).sum() / totals.tokens, {}))))
    assert not notices.here.list_all()
    try_functions(graph(loss=Loss(lambda p, batch, totals: (surrogate(p, batch).mean() + p.mean(), {}))))
    [said] = notices.here.list_all()
    assert "node 'update': its loss 'Loss' is " in said
    assert "divide sums by totals.tokens or totals.rows" in said


def test_the_losses_of_further_batches_are_tried_too() -> None:
    policy = rg.Policy("m", pool=rg.Pool("train"))
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 ="}], 3), group_size=2)
    advantages = rg.advantages(rollout, rg.reward(lambda response: 1.0, rollout), estimator=rg.GRPO())
    examples = rg.examples([{"prompt": "1 + 1 =", "answer": " 2"}], 4, policy)
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(), also=[(examples, Plain(lambda *_: None), 0.1)])
    with pytest.raises(RlgraphError, match="node 'update': its loss 'Plain' returned None"):
        try_functions(rg.Graph("g", step.metrics))


class Plain(Loss):
    reads = ()
