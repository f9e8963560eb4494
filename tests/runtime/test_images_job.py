"""Jobs whose prompts have images: from rows of data to weights, in workers as in one process; and what is refused before they start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import digests, forked_workers, seeing
from support.digests import DigestPolicy
from support.direct_forward import read_first_batch

import rlgraph as rg
from rlgraph.analysis.samples import read_samples
from rlgraph.engines.hf.images import open_images, processor_of, read_images
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.training.trained_model import TOKENS
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job


class Shows:
    """Answers the first turn with an image, of another size in each conversation, and rewards letters."""

    def __init__(self, prompt: str) -> None:
        self.place, self.turns = len(prompt), 0

    async def reset(self) -> None:
        return None

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        self.turns += 1
        shown = rg.agents.Message("user", "and <image>?", images=[seeing.picture(self.place, 16 * self.place + 20 * len(said.content))])
        return rg.agents.Turn([shown], reward=share_of_letters([said.content], [])[0], done=self.turns == 2)

    async def close(self) -> None: ...


ROWS = [
    *({"prompt": f"<image>what {index}?", "images": [seeing.picture(index, 40 * index)], "answer": str(index)} for index in range(1, 7)),
    {"prompt": "none", "images": [], "answer": "n"},
    {"prompt": "<image>or<image>", "images": [seeing.picture(8), seeing.picture(9)], "answer": "e"},
]


ROWS_OF_TEXT = [{"prompt": "what?", "answer": "n"}] * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(seeing.folder_of("idefics3", tmp_path_factory.mktemp("idefics3")))


def letters(response: str) -> float:
    return float(sum(map(str.isalpha, response)))


def share_of_letters(responses: list[str], answers: list[str]) -> list[float]:
    return [sum(letter.isalpha() for letter in response) / (len(response) + 1) for response in responses]


def graph(
    model: str,
    *,
    depth: int = 1,
    data: Any = ROWS,
    images: int | None = 2,
    tokens: int = 6,
    rollout: dict[str, Any] | None = None,
    **policy: Any,
) -> rg.Graph:
    generator = rg.Generator(
        model,
        pool=rg.Pool("rollout"),
        engine="transformers",
        sampling=rg.Sampling(max_tokens=tokens),
        dtype="float32",
        images=images,
        max_context=58 + tokens,
    )
    learner = DigestPolicy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32", **policy)
    weights = rg.feedback("weights", depth=depth)
    prompts = rg.prompts(data, count=4, seed=3)
    sampled = generator.rollout(prompts, weights, group_size=2, **(rollout or {}))
    judged = [] if "rewards" in sampled.columns else [rg.reward(share_of_letters, prompts, sampled)]
    advantages = rg.advantages(sampled, *judged, estimator=rg.GRPO())
    reference = rg.Reference(model, pool=rg.Pool("reference"), dtype="float32").log_probs(sampled)
    step = learner.update(sampled, advantages, reference, learner.log_probs(sampled), loss=rg.ClippedLoss(kl_coef=0.1))
    weights.close(step.weights)
    score = rg.evaluate(generator, data, weights, reward=share_of_letters, every=2) if images else None
    return rg.Graph("sees", step.metrics, *([score] if score else []))


@pytest.mark.stage("jobs")
def test_workers_equal_one_process_in_every_bit_and_engine_and_trainer_agree(model: str) -> None:
    made = graph(model, rollout={"chunks": 2})
    with forked_workers.job(made) as job:
        found = [digests.clockless_metrics(step) for step in job.steps(4)]
    assert found == digests.run_here(made, 4)
    assert found[0]["guards/mismatch"] < 1e-5
    assert "val/reward/mean@1" in found[1]


@pytest.mark.stage("jobs")
def test_a_job_learns_from_conversations_whose_environment_shows_images_and_records_them(model: str, tmp_path: Path) -> None:
    made = graph(model, images=3, tokens=60, rollout={"agent": rg.Agent(Shows, turn_tokens=4), "concurrency": 1})
    with forked_workers.job(made) as job:
        found = [step.metrics for step in rg.record(job, 2, tmp_path / "run", samples=1.0, quiet=True)]
    here = digests.run_here(made, 2)
    assert [step["digest/weights"] for step in found] == [step["digest/weights"] for step in here]
    assert found[0]["guards/mismatch"] < 1e-5
    samples = [sample for sample in read_samples(tmp_path / "run") if sample["kind"] == "training"]
    shown = [sample["response"].count("<image>") for sample in samples]
    assert shown == [len(sample["images"]) - sample["prompt"].count("<image>") for sample in samples]
    assert sum(shown) > len(samples) / 2
    assert all("".join(sample["token_texts"]) == sample["response"] for sample in samples)


def test_another_image_is_another_run(model: str) -> None:
    other = [ROWS[0] | {"images": [seeing.picture(77)]}, *ROWS[1:]]
    first, second = (digests.run_here(graph(model, depth=0, data=data), 2) for data in (ROWS, other))
    assert [step["digest/weights"] for step in first] != [step["digest/weights"] for step in second]


def test_an_example_with_images_is_learnt_as_the_chat_template_and_the_processor_write_it(model: str) -> None:
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-2), dtype="float32", self_test=False)
    examples = rg.examples([{"prompt": row["prompt"], "images": row["images"], "completion": row["answer"]} for row in ROWS], 8, policy)
    batch, processor = read_first_batch(examples), processor_of(model)
    for urls, prompt, prompt_mask, response, mask in zip(*(batch[name] for name in ("images", *TOKENS)), strict=True):
        parts = [{"type": "image"}] * len(json.loads(urls))
        own = next(row for row in ROWS if json.dumps(row["images"]) == urls)
        texts = [{"type": "text", "text": text} for text in own["prompt"].split("<image>") if text]
        content = [*parts[:1], *texts[:1], *parts[1:], *texts[1:]]
        said = [{"role": "user", "content": content}, {"role": "assistant", "content": own["answer"]}]
        text = processor.tokenizer.apply_chat_template(said, tokenize=False)
        given = {"images": [read_images(urls)]} if parts else {}
        [expected] = processor(text=[text], **given, add_special_tokens=False)["input_ids"]
        assert [*prompt[prompt_mask].tolist(), *response[: len(mask.nonzero())].tolist()] == list(expected)
    step = policy.update(examples, loss=rg.SFTLoss())
    with rg.compile(rg.Graph("sft", step.metrics), rg.Cluster(cpus=2)).run_here() as job:
        losses = [each.metrics["actor/pg_loss"] for each in job.steps(8)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.stage("jobs")
def test_a_run_records_small_images_and_exports_the_whole_folder_with_the_tower_as_it_was(model: str, tmp_path: Path) -> None:
    made = graph(model, depth=0)
    with forked_workers.job(made) as job:
        list(rg.record(job, 2, tmp_path / "run", samples=1.0, quiet=True))
        job.export(tmp_path / "out", dtype="float32")
    samples = list(read_samples(tmp_path / "run"))
    known = {url for row in ROWS for url in row["images"]}
    for sample in samples:
        for url in sample["images"]:
            [image] = open_images(json.dumps([url]))
            assert image.width <= 192
            assert (url in known) == (image.width < 192)
        assert sample["prompt"].count("<image>") == len(sample["images"])
        assert not {"images", "prompt_images"} & sample["columns"].keys()
    shown = {kind: {len(sample["images"]) for sample in samples if sample["kind"] == kind} for kind in ("training", "evaluation")}
    assert shown == {"training": {0, 1, 2}, "evaluation": {0, 1, 2}}
    old, new = (load_file(Path(of) / "model.safetensors") for of in (model, tmp_path / "out"))
    assert old.keys() == new.keys()
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert {name for name in same if "vision" not in name and "connector" not in name} == set()
    assert len(same) == sum("vision" in name or "connector" in name for name in old)


@pytest.mark.stage("jobs")
@pytest.mark.parametrize("vision", [False, True], ids=["language model", "all"])
def test_an_adapter_reaches_the_engine_and_is_exported_with_the_tower(model: str, tmp_path: Path, vision: bool) -> None:
    with forked_workers.job(graph(model, depth=0, adapter=rg.LoRA(rank=2), train_vision=vision)) as job:
        steps = list(job.steps(3))
        job.export(tmp_path / "out", dtype="float32")
    assert steps[-1].metrics["guards/mismatch"] < 1e-5
    old, new = (load_file(Path(of) / "model.safetensors") for of in (model, tmp_path / "out"))
    assert old.keys() == new.keys()
    adapted = {name for name in old if old[name].dim() == 2 and not any(part in name for part in ("embed", "lm_head"))}
    assert {name for name in old if not torch.equal(old[name], new[name])} == {n for n in adapted if vision or "text_model" in n}


@pytest.mark.stage("jobs")
def test_a_tower_that_is_trained_on_two_ranks_reaches_the_engine_and_both_exports(model: str, tmp_path: Path) -> None:
    """Some passes have no image: their ranks add up gradients of the tower too."""
    made = graph(model, depth=0, train_vision=True, data_parallel=2)
    plan = rg.compile(made, rg.Cluster(cpus=2))
    kept = Recovery(tmp_path / "kept", every=3, keep=1)
    with Job(made, plan, recovery=kept, dispatch_name="forked", deadline_s=60.0) as job:
        steps = list(job.steps(3))
        job.export(tmp_path / "out", dtype="float32")
    assert steps[-1].metrics["guards/mismatch"] < 1e-5
    rg.runs.export(tmp_path / "kept", tmp_path / "later", dtype="float32")
    old, new, later = (load_file(Path(of) / "model.safetensors") for of in (model, tmp_path / "out", tmp_path / "later"))
    assert old.keys() == new.keys() == later.keys()
    assert not [name for name in old if torch.equal(old[name], new[name])]
    assert all(torch.equal(new[name], later[name]) for name in new)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"images": None}, GraphError, r"node 'rollout' samples from prompts with images; set Generator\(images=\)"),
        (
            {"data": [{"prompt": "2 + 3 =", "answer": "5"}] * 4},
            GraphError,
            "graph 'sees': the generator of node 'rollout' has images=2, and no prompt .* put an item with an image first",
        ),
        ({"images": 1}, DataError, r"item 7 of the data set has 2 images, but node 'rollout' reads at most 1: raise Generator\(images=\)"),
        ({"rollout": {"agent": "true"}}, GraphError, "with which an agent program is not supported; leave it out"),
        ({"trainer": "megatron"}, GraphError, "gets images, which trainer='megatron' does not read"),
        ({"train_vision": True, "tensor_parallel": 2}, GraphError, "train_vision=True[)] does not work with tensor_parallel="),
        ({"train_vision": True, "data": ROWS_OF_TEXT}, GraphError, "train_vision=True, and its batch has no images"),
        ({"context_parallel": 2}, GraphError, r"ranks share rows \(context_parallel=2\)"),
    ],
    ids=["no images", "no image shown", "too many", "agent", "megatron", "vision and tensor", "vision of nothing", "context"],
)
def test_what_cannot_read_images_is_refused_before_anything_starts(
    model: str, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        rg.compile(graph(model, **given), rg.Cluster(cpus=4)).run_here()


def test_a_reference_that_follows_a_policy_whose_tower_is_trained_is_refused(model: str) -> None:
    made = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), train_vision=True)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", images=2)
    weights = rg.feedback("weights", depth=1)
    sampled = generator.rollout(rg.prompts(ROWS, count=4), weights, group_size=2)
    old = rg.Reference(model, pool=rg.Pool("reference")).old_log_probs(sampled, weights=weights)
    step = made.update(sampled, old, rg.advantages(sampled, rg.reward(letters, sampled), estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    with pytest.raises(GraphError, match="'old_log_probs' follows feedback 'weights', which carries the tower"):
        rg.Graph("follows", step.metrics)


def test_a_model_without_images_and_cut_prompts_are_refused(model: str, tmp_path: Path) -> None:
    from rlgraph.engines.hf.pretrained import tiny_model

    with pytest.raises(DataError, match=r"Generator\(images=2, engine='transformers'\) gets images, .* of the family 'llama'"):
        graph(str(tiny_model(tmp_path / "tiny")))
    cut = rg.data.rows(ROWS, overlong="truncate_left")
    with pytest.raises(GraphError, match=r"node 'rollout' samples .* whose tokens cannot be cut off"):
        graph(model, data=cut)
    generator = rg.Generator(model, pool=rg.Pool("rollout", cpus=1), engine="transformers", images=2)
    with pytest.raises(GraphError, match=r"node 'evaluate' asks .* whose tokens cannot be cut off"):
        rg.evaluate(generator, cut, rg.feedback("weights", depth=0), reward=lambda response: 1.0, every=1)
