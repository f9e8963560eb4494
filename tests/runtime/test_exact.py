"""A policy with exact=True: a job in which rollout and trainer agree to the bit, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_workers  # noqa: F401 (a way of dispatch)
from support.digests import ITEMS, odd_tokens
from support.grpo import grpo_graph
from support.tiny import tiny_llama, tiny_qwen

import rlgraph as rg
from rlgraph.errors import CertificateError, DataError, GraphError, PlanError
from rlgraph.nodes.training.trained_model import checked_rows
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.model_shapes import ModelShape
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.worker.spec import worker_specs

pytestmark = pytest.mark.stage("plugins")

SAMPLING = rg.Sampling(max_tokens=24, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_qwen(tmp_path_factory.mktemp("model"), "qwen3"))


def loop(model: str, *, depth: int = 0, base: str | None = None, **given: Any) -> rg.Graph:
    of_generator = {"sampling": SAMPLING, "dtype": "float32", "max_context": 64} | given.pop("generator", {})
    of_policy = {"optimizer": rg.AdamW(lr=1e-2), "dtype": "float32", "exact": True} | given.pop("policy", {})
    generator = rg.Generator(base or model, pool=rg.Pool("rollout"), **of_generator)
    policy = rg.Policy(model, pool=rg.Pool("train"), **of_policy)
    return grpo_graph(
        generator, policy, ITEMS, name="exact", rewards=odd_tokens, seed=3, group_size=4, **given, depth=depth, old_log_probs=True
    )


@pytest.mark.vllm
def test_each_step_learns_from_log_probs_that_are_the_trainers_own_to_the_bit(model: str) -> None:
    graph = loop(model)
    plan = rg.compile(graph, Cluster(cpus=2))
    assert plan.node("old_log_probs").pool is None  # no pass of the trainer
    assert "agree to the bit" in " ".join(str(plan).split())
    with Job(graph, plan, dispatch_name="forked", deadline_s=240.0) as job:
        found = [step.metrics for step in job.steps(4)]
    assert all(metrics["exact/tokens_checked"] == 4 * SAMPLING.max_tokens for metrics in found)
    assert [metrics["actor/ppo_kl"] for metrics in found] == [0.0] * 4  # before each update every ratio is 1
    assert all(metrics["actor/grad_norm"] > 0 for metrics in found)


class Engine:
    """Gives log-probs, one of which is wrong in its last bit."""

    def __init__(self, right: torch.Tensor, wrong: tuple[int, int] | None) -> None:
        self.right, self.wrong = right, wrong

    def scores(self, batch: dict[str, torch.Tensor], *, temperature: float) -> torch.Tensor:
        rows = batch["prompts"][:, 0]
        found = self.right[rows].clone()
        for at, row in enumerate(rows.tolist()):
            if self.wrong is not None and row == self.wrong[0]:
                found[at, self.wrong[1]] = torch.nextafter(found[at, self.wrong[1]], torch.tensor(0.0))
        return found


def test_one_bit_of_one_token_ends_the_run_in_the_step_that_checks_it() -> None:
    right = -torch.rand(10, 5, generator=torch.Generator().manual_seed(0)) - 0.5
    mask = torch.ones(10, 5).bool()
    mask[6, 4] = False  # a token of a tool: nobody's log-prob
    batch = {"prompts": torch.arange(10)[:, None], "prompt_mask": torch.ones(10, 1).bool(), "responses": right.long()}
    batch |= {"response_mask": mask, "rollout_log_probs": right}
    assert checked_rows(Engine(right, None), batch, 0, 1.0) == {"exact/tokens_checked": 20.0}
    assert checked_rows(Engine(right, (6, 3)), batch, 0, 1.0) == {"exact/tokens_checked": 20.0}
    assert checked_rows(Engine(right, (6, 4)), batch, 1, 1.0) == {"exact/tokens_checked": 19.0}
    with pytest.raises(CertificateError, match=r"step 1: 1 of 19 tokens of 4 rows have different log-probs .* Leave out exact"):
        checked_rows(Engine(right, (6, 3)), batch, 1, 1.0)
    with pytest.raises(CertificateError, match="step 2: 1 of 20 tokens"):
        checked_rows(Engine(right, (9, 0)), batch, 2, 1.0)


def alone(model: str) -> rg.Graph:
    """A policy whose weights no generator follows."""
    policy = rg.Policy(model, pool=rg.Pool("train"), dtype="float32", exact=True)
    rollout = rg.Generator(model, pool=rg.Pool("rollout"), sampling=SAMPLING).rollout(rg.prompts(ITEMS, count=4), group_size=4)
    step = policy.update(rollout, rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO()), loss=rg.ClippedLoss())
    return rg.Graph("alone", step.metrics)


def imitates(model: str) -> object:
    policy = rg.Policy(model, pool=rg.Pool("train"), dtype="float32", exact=True)
    return policy.update(rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 8, policy), loss=rg.SFTLoss())


REFUSED: dict[str, tuple[Callable[[str, str], object], str]] = {
    "depth": (lambda m, o: loop(m, depth=1), "at depth=1: responses from older weights have different log-probs; use depth=0"),
    "engine": (lambda m, o: loop(m, generator={"engine": "transformers"}), "its engine uses different kernels than the trainer"),
    "folder": (lambda m, o: loop(m, base=o), "pass the same path"),
    "the generator's dtype": (lambda m, o: loop(m, generator={"dtype": "auto"}), r"use rg.Generator\(…, dtype='float32'\)"),
    "the policy's dtype": (lambda m, o: loop(m, policy={"dtype": "auto"}), "exact works with float32 on cores and bfloat16 on GPUs; write"),
    "another dtype": (lambda m, o: loop(m, policy={"dtype": "bfloat16"}), r"dtype='bfloat16', and has .* use .*dtype='bfloat16'\)"),
    "an engine on several GPUs": (lambda m, o: loop(m, generator={"tensor_parallel": 2}), "spans 2 GPUs, which sum in a different order"),
    "fp8 weights": (lambda m, o: loop(m, generator={"weights_dtype": "fp8"}), "its engine has weights_dtype="),
    "guessed tokens": (lambda m, o: loop(m, generator={"drafts": rg.options.PromptLookup()}), "its engine has drafts="),
    "top_p": (lambda m, o: loop(m, generator={"sampling": replace(SAMPLING, top_p=0.9)}), "top_p=0.9, .* use top_p=1"),
    "top_k": (lambda m, o: loop(m, generator={"sampling": replace(SAMPLING, top_k=9)}), "top_k=9, .* use top_p=1, top_k=0"),
    "greedy": (lambda m, o: loop(m, generator={"sampling": replace(SAMPLING, temperature=0)}), "a temperature above 0"),
    "compiled": (lambda m, o: loop(m, policy={"compiled": True}), r"Policy\(exact=True, compiled=True\): .* leave out one"),
    "adapter": (lambda m, o: loop(m, policy={"adapter": rg.LoRA(rank=4)}), "the combination is not tested to be exact"),
    "no generator": (lambda m, o: alone(m), "no generator follows its weights; close a feedback edge with them"),
    "no rollout": (lambda m, o: imitates(m), "node 'update' trains a policy with exact=True on a batch that no engine sampled"),
    "recompute": (lambda m, o: loop(m, policy={"recompute": True}), "recompute=True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_proven_is_refused_where_it_is_declared(case: str, model: str, tmp_path: Path) -> None:
    build, match = REFUSED[case]
    with pytest.raises(GraphError, match=match):
        build(model, str(tiny_llama(tmp_path)))


def test_a_plan_counts_the_weights_that_are_packed_for_the_kernels(model: str) -> None:
    parts = {policy: _parts(loop(model, policy={"exact": policy})) for policy in (True, False)}
    packed = {policy: [size for name, size in found.items() if "packed weights" in name] for policy, found in parts.items()}
    assert packed[False] == []
    assert packed[True] == [ModelShape.from_config(json.loads((Path(model) / "config.json").read_text())).parameters * 4]  # type: ignore[union-attr]


def _parts(graph: rg.Graph) -> dict[str, int]:
    plan = rg.compile(graph, Cluster(cpus=2))
    return {part: size for need in plan.memory if not need.loading for part, size in need.parts}


def test_each_dtype_has_its_devices(model: str) -> None:
    with pytest.raises(PlanError, match=r"generator would run on 2 cores, .* dtype='float32' is proven on one core each: .* cpus=1"):
        rg.compile(loop(model), Cluster(cpus=4))
    with pytest.raises(PlanError, match="would run on a GPU"):
        rg.compile(loop(model), Cluster(gpus=2, cpus=4))
    specs = worker_specs(loop(model), rg.compile(loop(model), Cluster(cpus=2)), "folder", b"", 1.0)
    assert {spec.worker.model: spec.exact for spec in specs if spec.worker.model} == {"generator": True, "policy": True}
    half = loop(model, generator={"dtype": "bfloat16"}, policy={"dtype": "bfloat16"})
    with pytest.raises(PlanError, match=r"would run on cores, .* dtype='bfloat16' is proven on GPUs; write dtype='float32'"):
        rg.compile(half, Cluster(cpus=2))
    plan = rg.compile(half, Cluster(gpus=2, cpus=4))
    assert plan.certificate.exact
    assert not any("packed weights" in dict(need.parts) for need in plan.memory)
    plain = loop(model, policy={"exact": False})
    assert not any(spec.exact for spec in worker_specs(plain, rg.compile(plain, Cluster(cpus=2)), "folder", b"", 1.0))


def test_a_family_without_proof_is_refused_before_anything_starts(model: str, tmp_path: Path) -> None:
    from support.families import folder_of

    from rlgraph.nodes.training.trained_model import check_trained

    folder = folder_of("gemma2", tmp_path)
    policy = rg.Policy(str(folder), pool=rg.Pool("train"), dtype="float32", exact=True)
    with pytest.raises(DataError, match="the family 'gemma2' is not proven to be exact; proven are: llama, qwen2, qwen3"):
        check_trained(policy)
