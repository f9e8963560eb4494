"""Process rewards: learnt from steps with labels, given at the last token of each step, and made advantages of groups."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

import rlgraph as rg
from rlgraph.algorithms import ProcessGRPO, StepwiseLoss, Totals
from rlgraph.engines.hf.model_files import load_tokenizer
from rlgraph.engines.hf.pretrained import check_model, tiny_model
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.training.learned_reward import step_ends

ROWS = [
    {"prompt": "1 + 2 + 3 =", "completions": ["1 + 2 = 3", "3 + 3 = 6"], "labels": [True, True]},
    {"prompt": "2 + 2 + 3 =", "completions": ["2 + 2 = 5", "5 + 3 = 8", "8"], "labels": [False, True, False]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "model", vocab=288))


@pytest.mark.parametrize(
    ("pieces", "separator", "ends"),
    [
        (["a", "\n", "b", "\n"], "\n", [1, 3]),
        (["a", "\n", "\n", "b"], "\n", [2, 3]),
        (["\n", "a", "\n", " ", ""], "\n", [2]),
        (["a", "\nb", "\n"], "\n", [1, 2]),
        (["a", "\n", "b", "\n\n", "c", ""], "\n\n", [3, 5]),
        (["a", ".\n", "\n", "b"], "\n\n", [2, 3]),
        ([""], "\n", []),
        ([], "\n", []),
    ],
)
def test_a_step_ends_with_its_separators_and_the_last_one_with_the_response(pieces: list[str], separator: str, ends: list[int]) -> None:
    assert step_ends(pieces, separator) == ends


def test_the_loss_is_the_cross_entropy_of_two_classes() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(3, 5, generator=draw), torch.tensor([[1.0, -1, 0, 0, 1], [0, 0, -1, 1, -1], [0, 0, 0, 0, 0]])
    mask = labels != 0
    loss, metrics = StepwiseLoss()(scores, {"response_mask": mask, "step_labels": labels}, Totals.of(mask))
    logits = torch.stack([torch.zeros(3, 5), scores], -1)[mask]
    assert loss.item() == pytest.approx(cross_entropy(logits, (labels[mask] > 0).long()).item(), abs=1e-6)
    assert metrics["reward/accuracy"] == pytest.approx((logits.argmax(-1) == (labels[mask] > 0)).float().mean().item())


def test_advantages_are_the_sums_of_the_following_normalised_steps_of_the_group() -> None:
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [True, True, True, False]])
    ends = torch.tensor([[False, True, False, True], [True, True, False, False], [False, False, True, False]])
    rewards = torch.tensor([[0.0, 0.2, 0.0, 0.9], [0.4, 0.1, 0.0, 0.0], [0.0, 0.0, 0.7, 0.0]])
    batch = {"response_mask": mask, "step_mask": ends, "step_rewards": rewards, "group_ids": torch.tensor([1, 1, 2])}
    found = ProcessGRPO()(batch)["advantages"]
    steps = torch.tensor([0.2, 0.9, 0.4, 0.1])
    first, last, third, fourth = ((steps - steps.mean()) / (steps.std() + 1e-6)).tolist()
    expected = [[first + last, first + last, last, last], [third + fourth, fourth, 0, 0], [0, 0, 0, 0]]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-5)
    with pytest.raises(DataError, match="'step_mask' is"):
        ProcessGRPO()({**batch, "step_mask": rewards})


def test_a_process_reward_model_learns_labels_and_scores_each_step_by_its_own_text(model: str, tmp_path: Path) -> None:
    judge = rg.LearnedReward(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=3e-3), dtype="float32", micro_batch_tokens=60)
    source = rg.stages.stepwise(ROWS, 4, judge)
    columns: Any = source.node.operation.start(Context())(0, {})
    labels, mask = columns["step_labels"], columns["response_mask"]
    tokenizer = load_tokenizer(model)
    for row in range(4):
        texts = tokenizer.decode(columns["responses"][row][mask[row]]).split("\n")
        good = next(each for each in ROWS if each["completions"] == texts[:-1])["labels"]  # type: ignore[index]
        assert labels[row][labels[row] != 0].tolist() == [1.0 if label else -1.0 for label in good]
    plan = rg.compile(rg.Graph("judge", judge.update(source, loss=StepwiseLoss()).metrics), rg.Cluster(cpus=2))
    with plan.run_here() as job:
        steps = [step.metrics for step in job.steps(10)]
        job.export(tmp_path / "judge", dtype="float32")
    assert steps[0]["critic/vf_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert steps[-1]["critic/vf_loss"] < 0.5
    scorer = rg.LearnedReward(str(tmp_path / "judge"), pool=rg.Pool("judge"), dtype="float32")
    operation: Any = scorer.step_rewards(source).node.operation
    engine = scorer.load(Context())
    found, metrics = operation.fire(Context(engine=engine), columns)
    assert (found["step_mask"] == (labels != 0)).all(), "separators of sampled text end the steps of the data"
    assert ((found["step_rewards"] > 0.5) == (labels > 0))[labels != 0].float().mean() >= 0.8
    assert metrics["step_rewards/steps"] == (labels != 0).sum().item() / 4
    shorter = {**columns, "response_mask": mask & (torch.arange(mask.shape[1]) <= (labels[0] != 0).nonzero()[0, 0])}
    first = (labels != 0) & shorter["response_mask"]
    again = operation.fire(Context(engine=engine), shorter)[0]["step_rewards"]
    engine.close()
    assert torch.allclose(again[first], found["step_rewards"][first], atol=1e-5), "a step's reward does not see later ones"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"prompt": "1", "completions": ["2"]}, "a solution has 'prompt', 'completions'"),
    "labels of other steps": ({"prompt": "1", "completions": ["2"], "labels": [True, False]}, "for each of its 1 steps"),
    "an empty step": ({"prompt": "1", "completions": [""], "labels": [True]}, "none of them empty"),
    "no prompt": ({"prompt": "", "completions": ["2"], "labels": [True]}, "a non-empty text"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_row_of_another_form_is_refused_where_it_is_declared(what: str) -> None:
    row, message = MISTAKES[what]
    with pytest.raises(DataError, match=message):
        rg.stages.stepwise([row], 1, rg.LearnedReward("tiny", pool=rg.Pool("train")))


def test_process_rewards_train_a_policy_in_a_graph(model: str, tmp_path: Path) -> None:
    head = shutil.copytree(model, tmp_path / "judge")
    save_file({"score.weight": torch.zeros(1, check_model(head).hidden_size)}, head / "head.safetensors")
    sampling = rg.Sampling(max_tokens=6)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, max_context=64, dtype="float32")
    policy = rg.Policy(model, pool=rg.Pool("train"), dtype="float32")
    judge, weights = rg.LearnedReward(str(head), pool=rg.Pool("judge"), dtype="float32"), rg.feedback("weights", depth=0)
    rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=2), weights, group_size=2)
    advantages = rg.advantages(rollout, judge.step_rewards(rollout), estimator=ProcessGRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    with rg.compile(rg.Graph("process", step.metrics), rg.Cluster(cpus=2)).run_here() as job:
        (found,) = job.steps(1)
    assert found.metrics["step_rewards/mean"] == pytest.approx(0.5), "a head of zeros"
    with pytest.raises(GraphError, match="step_rewards"):
        rg.advantages(rollout, estimator=ProcessGRPO())
