"""The memory of a GPU whose models take turns: an engine takes its whole share while it is awake, and moments are away meanwhile."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.grpo import grpo_graph

import rlgraph as rg
from benchmarks.prediction import a_priori
from benchmarks.speed import small_gpu_jobs
from benchmarks.speed.small_gpu_jobs import ADAPTER, FULL, Size
from rlgraph.errors import PlanError
from rlgraph.plan.plan import PlannedMemory

GIB = 1 << 30
H200 = rg.Cluster(gpus=1, cpus=16, gpu="H200", gpu_memory_bytes=int(139.8 * GIB))
MEASURED = json.loads((a_priori.RESULTS / "small_gpu_h200.json").read_text())["parts"]
JOBS = {"colocated": FULL, "colocated_stay": replace(FULL, offload="never"), "colocated_8b": ADAPTER}


def planned(size: Size, folder: Path, cluster: rg.Cluster = H200) -> PlannedMemory:
    plan = rg.compile(small_gpu_jobs.graph(size, a_priori.folder(size.shape, folder), gpu=True), cluster)
    return next(need for need in plan.memory if need.pool == "gpu" and not need.loading)


@pytest.mark.parametrize("job", JOBS)
def test_the_peak_of_a_job_in_turns_is_planned_as_measured(job: str, tmp_path: Path) -> None:
    need = planned(JOBS[job], tmp_path)
    assert need.peak_bytes == pytest.approx(MEASURED[job]["peak_bytes"], rel=0.1)
    assert need.least_bytes == need.peak_bytes  # nothing of it can be left out
    assert sum(size for _, size in need.parts) == need.peak_bytes


def test_moments_are_beside_the_engine_only_where_they_stay(tmp_path: Path) -> None:
    away, stays = (dict(planned(JOBS[job], tmp_path).parts) for job in ("colocated", "colocated_stay"))
    assert "optimizer" not in away
    assert "gradients" not in stays
    assert stays["optimizer"] == 2 * stays["weights"]
    engine = ("engine's weights", "keys and values", "rest of the engine's share")
    assert sum(away[what] for what in engine) == sum(stays[what] for what in engine) == int(0.4 * 139.8 * GIB)


def test_a_trainer_that_needs_more_than_the_engine_sets_the_peak(tmp_path: Path) -> None:
    parts = dict(planned(replace(FULL, memory=0.1), tmp_path).parts)
    assert parts["optimizer"] + parts["gradients"] == 3 * parts["weights"]
    assert "rest of the engine's share" not in parts


def test_the_base_of_an_adapter_is_within_the_share_and_stays(tmp_path: Path) -> None:
    parts = dict(planned(ADAPTER, tmp_path).parts)
    own = ("base of merged adapters", "engine's weights", "keys and values", "rest of the engine's share")
    assert sum(parts[what] for what in own) == int(0.34 * 139.8 * GIB)


def test_an_engine_whose_share_leaves_no_room_for_what_stays_is_refused(tmp_path: Path) -> None:
    small = replace(H200, gpu_memory_bytes=80 * GIB)
    planned(replace(FULL, memory=0.8, offload=None), tmp_path, small)
    with pytest.raises(
        PlanError, match=r"at least 86\.\d GiB on a GPU of 'gpu', which has 80\.0 GiB: rest of the engine's share .*memory="
    ):
        planned(replace(FULL, memory=0.8, offload="never"), tmp_path, small)


def test_an_engine_alone_takes_nine_tenths_unless_it_is_told(tmp_path: Path) -> None:
    model = a_priori.folder("0.6B", tmp_path)

    def taken(memory: float | None) -> int:
        generator = rg.Generator(model, pool=rg.Pool("rollout"), memory=memory, max_context=512)
        graph = grpo_graph(generator, rg.Policy(model, pool=rg.Pool("train")), count=2, group_size=4)
        plan = rg.compile(graph, replace(H200, gpus=2))
        return next(need.peak_bytes for need in plan.memory if need.pool == "rollout" and not need.loading)

    assert (taken(None), taken(0.5)) == (int(0.9 * 139.8 * GIB), int(0.5 * 139.8 * GIB))


def test_slots_of_batches_are_counted_on_their_host(tmp_path: Path) -> None:
    prompts = rg.prompts([{"prompt": "1"}], count=4 * 10**6)
    model = a_priori.folder(FULL.shape, tmp_path)
    rollout = rg.Generator(model, pool=rg.Pool("rollout"), max_context=4096).rollout(prompts)
    graph = rg.Graph("g", rg.reward(lambda responses: responses, rollout))
    plan = rg.compile(graph, rg.Cluster(cpus=2, host_memory_bytes=2**50))
    slots = dict(plan.memory[0].parts)["slots of batches"]
    assert slots == sum(channel.slots * (channel.bytes or 0) for channel in plan.channels if channel.transport == "shm") > 10 * GIB
    with pytest.raises(PlanError, match=r"slots of batches 2.*lower count, group_size, max_tokens or depth"):
        rg.compile(graph, rg.Cluster(cpus=2, host_memory_bytes=30 * GIB))


def test_a_peak_above_the_memory_says_that_the_engine_queues_and_how_much_is_enough(tmp_path: Path) -> None:
    rollout = rg.Generator(a_priori.folder(FULL.shape, tmp_path), pool=rg.Pool("rollout"), max_context=8192).rollout(
        rg.prompts([{"prompt": "1"}], count=256)
    )
    plan = rg.compile(rg.Graph("g", rollout), rg.Cluster(gpus=1, gpu_memory_bytes=10 * GIB))
    (need,) = (need for need in plan.memory if need.pool == "rollout" and not need.loading)
    assert need.least_bytes <= 10 * GIB < need.peak_bytes
    assert f"the engine queues responses without room, so {need.least_bytes / GIB:.2f} GiB are enough" in " ".join(str(plan).split())
