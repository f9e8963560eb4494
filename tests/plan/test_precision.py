"""`dtype="auto"`: what a plan lets its models compute in, on which devices, and that it says so."""

import pytest
from support.grpo import zero_reward

import rlgraph as rg
from rlgraph.runtime.worker.spec import worker_specs

CPU_BF16 = rg.planning.Precision("bfloat16", "the CPU has AMX")
OLD_GPU = rg.planning.Precision("float32", "the GPU has compute capability 7.5; bfloat16 begins at 8.0")


def graph(policy: str = "auto", *, reference_on_host: bool = False) -> rg.Graph:
    generator = rg.Generator("m", pool=rg.Pool("rollout"))
    trained = rg.Policy("m", pool=rg.Pool("train"), dtype=policy)
    reference = rg.Reference("m", pool=rg.Pool("reference", cpus=1) if reference_on_host else trained.pool)
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    rollout = generator.rollout(prompts, weights)
    kept = reference.log_probs(rollout)
    step = trained.update(
        rollout, kept, rg.advantages(rollout, rg.reward(zero_reward, rollout), estimator=rg.RLOO()), loss=rg.ClippedLoss(kl_coef=0.1)
    )
    weights.close(step.weights)
    return rg.Graph("precision", step.metrics)


def dtypes(plan: rg.Plan) -> dict[str, str]:
    return {model.name: model.dtype for model in plan.models}


@pytest.mark.parametrize(
    ("cluster", "dtype", "why"),
    [
        (rg.Cluster(cpus=2), "float32", "does not say"),
        (rg.Cluster(cpus=2, cpu_precision=CPU_BF16), "bfloat16", "AMX"),
        (rg.Cluster(gpus=2), "bfloat16", "GPUs are taken to"),
        (rg.Cluster(gpus=2, gpu_precision=OLD_GPU, cpu_precision=CPU_BF16), "float32", "7.5"),
    ],
)
def test_auto_is_what_the_devices_compute_in_and_the_plan_says_why(cluster: rg.Cluster, dtype: str, why: str) -> None:
    plan = rg.compile(graph(), cluster)
    assert dtypes(plan) == {"generator": dtype, "policy": dtype, "reference": dtype}
    assert all(why in model.why for model in plan.models)
    said = str(plan)
    assert f"policy     {dtype}" in said
    assert why in said
    assert rg.Plan.from_json(plan.to_json()).models == plan.models


def test_a_dtype_that_was_asked_for_is_kept() -> None:
    plan = rg.compile(graph(policy="bfloat16"), rg.Cluster(cpus=2))
    assert dtypes(plan) == {"generator": "float32", "policy": "bfloat16", "reference": "float32"}


def test_a_model_on_cores_beside_gpus_computes_in_what_the_cores_do() -> None:
    plan = rg.compile(graph(reference_on_host=True), rg.Cluster(gpus=2, cpus=2))
    assert dtypes(plan) == {"generator": "bfloat16", "policy": "bfloat16", "reference": "float32"}


def test_workers_and_weights_get_the_dtype_of_the_plan() -> None:
    made = graph()
    for cluster, dtype in ((rg.Cluster(cpus=2), "float32"), (rg.Cluster(cpus=2, cpu_precision=CPU_BF16), "bfloat16")):
        each = worker_specs(made, rg.compile(made, cluster), "", b"", 1.0)
        assert {spec.model.dtype for spec in each if isinstance(spec.model, rg.Generator | rg.Policy)} == {dtype}
        assert {sent for spec in each for _, _, sent in spec.loops} == {dtype}
