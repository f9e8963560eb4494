"""A reward model scores texts in batches as it scores each alone, and works on the parts of a rollout."""

from pathlib import Path

import pytest
import torch
from programs.data_parallel_ranks import score_on_ranks
from support.templates import model_with

import rlgraph as rg
from rlgraph.engines.hf.chat_template import ChatPrompt
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.engines.transformers.engine import ScoreEngine, _batches
from rlgraph.errors import DataError, GraphError

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
PROMPTS = ["1 + 1 =", "a much longer prompt than the others", "2 + 2 =", "!"]
RESPONSES = [" 2", " ends with !", "", " a response of some length"]


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy") / "tiny")


def reward_folder(folder: Path, policy_folder: Path, labels: int = 1, template: str | None = None) -> Path:
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    config = AutoConfig.from_pretrained(policy_folder, num_labels=labels)
    torch.manual_seed(3)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def engine(folder: Path, *, batch_tokens: int = 10_000, label: int | None = None) -> ScoreEngine:
    return ScoreEngine(folder, device="cpu", dtype=torch.float32, label=label, batch_tokens=batch_tokens)


@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
def test_a_batch_is_scored_as_each_text_alone(tmp_path: Path, policy_folder: Path, batch_tokens: int) -> None:
    folder = reward_folder(tmp_path / "reward", policy_folder)
    alone = [engine(folder).scores([p], [r]).item() for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    found = engine(folder, batch_tokens=batch_tokens).scores(PROMPTS, RESPONSES)
    assert found.tolist() == pytest.approx(alone, abs=1e-5)
    assert len(set(alone)) == 4


@pytest.mark.parametrize(("world", "batch_tokens"), [(2, 60), (3, 100), (2, 10_000)])
def test_several_ranks_score_as_one_bit_for_bit(tmp_path: Path, policy_folder: Path, world: int, batch_tokens: int) -> None:
    folder = reward_folder(tmp_path / "reward", policy_folder)
    texts = [f"{prompt} {i}" for i in range(6) for prompt in PROMPTS], [response * (i % 3) for i in range(6) for response in RESPONSES]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = engine(folder, batch_tokens=batch_tokens).scores(*texts)
    finally:
        torch.set_num_threads(threads)
    found = score_on_ranks(folder, tmp_path, world, batch_tokens, texts)
    assert all(torch.equal(of_rank[:-1], alone) for of_rank in found)
    computed = [int(of_rank[-1]) for of_rank in found]
    assert max(computed) - min(computed) <= 1, "each rank computes its share"
    assert sum(computed) > 1 or batch_tokens == 10_000


def test_a_pool_of_several_devices_has_a_rank_on_each_and_each_holds_the_model(policy_folder: Path) -> None:
    folder, weights = str(policy_folder), []
    for devices in (1, 3):
        prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
        rollout = rg.Generator(folder, pool=rg.Pool("rollout", gpus=1)).rollout(prompts, group_size=2)
        policy = rg.Policy(folder, pool=rg.Pool("train", gpus=1))
        rewards = rg.RewardModel(folder, pool=rg.Pool("judge", gpus=devices)).rewards(prompts, rollout)
        step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
        plan = rg.compile(rg.Graph("judged", step.metrics), rg.Cluster(gpus=2 + devices, cpus=8))
        assert [(w.rank, w.world) for w in plan.workers if w.pool == "judge"] == [(rank, devices) for rank in range(devices)]
        weights.append(next(dict(need.parts) for need in plan.memory if need.place == "a GPU of 'judge'"))
    held = [next(size for part, size in parts.items() if "weights" in part) for parts in weights]
    assert held[0] == held[1] > 0


def test_texts_are_put_into_the_models_chat_template(tmp_path: Path, policy_folder: Path) -> None:
    plain = engine(reward_folder(tmp_path / "plain", policy_folder))
    chat = engine(reward_folder(tmp_path / "chat", policy_folder, template=TEMPLATE))
    assert chat.scores(["ask"], ["say"]).item() == plain.scores(["<user>ask<assistant>say"], [""]).item()


ASKED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 1"},
]


def test_a_conversation_is_rendered_by_the_template_of_the_reward_model_message_by_message(tmp_path: Path, policy_folder: Path) -> None:
    plain = engine(reward_folder(tmp_path / "plain", policy_folder))
    chat = engine(reward_folder(tmp_path / "chat", policy_folder, template=TEMPLATE))
    whole = "<system>be brief<user>1 + 1<assistant>2<user>and 1"
    asked, begun = ChatPrompt(ASKED).to_json(), ChatPrompt(ASKED[:3], continue_final=True).to_json()
    assert chat.scores(["and 1"], ["3"], [asked]).item() == plain.scores([f"{whole}<assistant>3"], [""]).item()
    assert chat.scores([""], ["!"], [begun]).item() == plain.scores(["<system>be brief<user>1 + 1<assistant>2!"], [""]).item()
    assert plain.scores(["and 1"], ["3"], [asked]).item() == plain.scores(["and 1"], ["3"]).item(), "a model without a template"


def conversations(policy: str, judge: str, *, pass_prompts: bool) -> rg.Graph:
    sampling = rg.Sampling(max_tokens=4)
    generator = rg.Generator(policy, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32", max_context=200)
    prompts = rg.prompts([{"prompt": ASKED}, {"prompt": ASKED[:2]}], count=2)
    rollout = generator.rollout(prompts, group_size=2)
    judge_model = rg.RewardModel(judge, pool=rg.Pool("judge"), dtype="float32")
    rewards = judge_model.rewards(*((prompts, rollout) if pass_prompts else (rollout,)))

    @rg.node(reads="prompt_messages responses response_mask rewards", writes="checked", trial=False)
    def check(batch: rg.Columns) -> rg.Columns:
        from transformers import AutoTokenizer

        tokens = [row[m].tolist() for row, m in zip(batch["responses"], batch["response_mask"], strict=True)]  # type: ignore[union-attr]
        said = AutoTokenizer.from_pretrained(policy).batch_decode(tokens, skip_special_tokens=True)
        scores = engine(Path(judge)).scores([""] * 4, said, [str(text) for text in batch["prompt_messages"]])
        assert batch["rewards"].tolist() == pytest.approx(scores.tolist(), abs=1e-5)  # type: ignore[union-attr]
        return {"checked": batch["rewards"]}

    return rg.Graph("judged", check(prompts, rollout, rewards))


@pytest.mark.parametrize("pass_prompts", [True, False])
def test_prompts_of_messages_reach_the_reward_model_as_messages(tmp_path: Path, policy_folder: Path, pass_prompts: bool) -> None:
    policy, judge = model_with(tmp_path / "policy", "smollm2"), reward_folder(tmp_path / "judge", policy_folder, template=TEMPLATE)
    with rg.compile(conversations(str(policy), str(judge), pass_prompts=pass_prompts), rg.Cluster(cpus=3)).run_here() as job:
        assert len(list(job.steps(1))) == 1


def test_a_template_of_a_reward_model_that_refuses_a_conversation_stops_the_launch(tmp_path: Path, policy_folder: Path) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    policy, judge = model_with(tmp_path / "policy", "smollm2"), reward_folder(tmp_path / "judge", policy_folder, template=strict)
    plan = rg.compile(conversations(str(policy), str(judge), pass_prompts=False), rg.Cluster(cpus=3))
    with pytest.raises(DataError, match=r"item 0 of the data set: the chat template of the reward model .* refuses it \(.*no system role"):
        plan.run_here()


def test_a_model_of_several_numbers_needs_a_label(tmp_path: Path, policy_folder: Path) -> None:
    folder = reward_folder(tmp_path / "reward", policy_folder, labels=3)
    with pytest.raises(DataError, match="returns 3 numbers per text; choose the reward among them with label=0 to 2"):
        engine(folder)
    with pytest.raises(DataError, match="there is no label=3"):
        engine(folder, label=3)
    assert len({engine(folder, label=label).scores(["a"], ["b"]).item() for label in range(3)}) == 3


def test_a_text_that_does_not_fit_is_named(tmp_path: Path, policy_folder: Path) -> None:
    with pytest.raises(DataError, match="response 1 and its prompt have 301 tokens, but the reward model reads 1 to 256"):
        engine(reward_folder(tmp_path / "reward", policy_folder)).scores(["a", "b"], ["a", "b" * 300])


def test_batches_hold_every_text_once_and_no_more_tokens_than_they_may() -> None:
    lengths = [3, 9, 1, 4, 4, 20, 2]
    batches = list(_batches(lengths, 12))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 12 for batch in batches)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_reward_model_on_a_pool_of_its_own_gives_the_rewards_of_a_training_run(tmp_path: Path, policy_folder: Path, chunks: int) -> None:
    folder = str(reward_folder(tmp_path / "reward", policy_folder))
    sampling = rg.Sampling(max_tokens=6)
    generator = rg.Generator(str(policy_folder), pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    policy = rg.Policy(str(policy_folder), pool=rg.Pool("train"), dtype="float32")
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts([{"prompt": f"{a} + 1 ="} for a in range(4)], count=4)
    rollout = generator.rollout(prompts, weights, group_size=2, chunks=chunks)
    judge = rg.RewardModel(folder, pool=rg.Pool("judge"), dtype="float32")
    rewards = judge.rewards(prompts, rollout)

    @rg.node(reads="prompts prompt_mask responses response_mask rewards", writes="checked", trial=False)
    def check(batch: rg.Columns) -> rg.Columns:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(policy_folder)
        texts = [
            tokenizer.batch_decode([row[m].tolist() for row, m in zip(batch[c], batch[k], strict=True)], skip_special_tokens=True)
            for c, k in (("prompts", "prompt_mask"), ("responses", "response_mask"))
        ]
        assert batch["rewards"].tolist() == pytest.approx(engine(Path(folder)).scores(*texts).tolist(), abs=1e-5)  # type: ignore[union-attr]
        return {"checked": batch["rewards"]}

    step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    plan = rg.compile(rg.Graph("judged", step.metrics, check(rollout, rewards)), rg.Cluster(cpus=3))
    assert plan.node("reward").chunks == chunks
    with plan.run_here() as job:
        found = list(job.steps(2))
    assert all({"critic/rewards/mean", "critic/rewards/max"} <= set(each.metrics) for each in found)


def test_responses_of_an_unknown_tokenizer_are_refused() -> None:
    @rg.node(reads="prompt_texts", writes="responses response_mask")
    def typed(batch: rg.Columns) -> rg.Columns:
        raise AssertionError("never run")

    prompts = rg.prompts([{"prompt": "?"}], count=1)
    with pytest.raises(GraphError, match="no rollout whose model's tokenizer can decode the responses"):
        rg.RewardModel("m", pool=rg.Pool("judge")).rewards(prompts, typed(prompts))
