"""Shapes from config.json, memory and times that follow from them, and plans that cannot fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.grpo import grpo_graph, zero_reward
from support.qwen3_shapes import QWEN3_8B, QWEN3_30B_A3B

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.plan.estimates import PIECE_BYTES
from rlgraph.plan.memory import loading_peaks
from rlgraph.plan.model_shapes import AdapterSize, ModelShape
from rlgraph.runtime.worker.spec import worker_specs
from rlgraph.settings import RECOMPUTE, Recompute

GIB = 1 << 30


def folder(path: Path, config: dict[str, object]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def loop(
    model: str,
    *,
    tensor_parallel: int = 1,
    micro_batch_tokens: int = 16384,
    shared: bool = False,
    buffers: int = 1,
    depth: int = 1,
    pools: tuple[rg.Pool, rg.Pool] | None = None,
    trainer: str | rg.extend.TrainerSpec = "fsdp",
    adapter: rg.LoRA | None = None,
) -> rg.Graph:
    together = rg.Pool("shared")
    rollout_pool, train_pool = (together, together) if shared else pools or (rg.Pool("rollout"), rg.Pool("train"))
    generator = rg.Generator(model, pool=rollout_pool, tensor_parallel=tensor_parallel, max_context=4096)
    policy = rg.Policy(model, pool=train_pool, micro_batch_tokens=micro_batch_tokens, recompute=True, trainer=trainer, adapter=adapter)
    return grpo_graph(generator, policy, count=16, group_size=8, depth=0 if shared else depth, buffers=buffers)


def no_trainer(model: object, place: object) -> Any:
    raise AssertionError("a plan loads nothing")


def parts(plan: rg.Plan, place: str) -> dict[str, int]:
    return dict(next(need.parts for need in plan.memory if need.place == place))


def at(plan: rg.Plan, instant: str) -> dict[str, int]:
    """What a GPU that trains has at an instant of an update besides what stays."""
    need = next(need for need in plan.memory if need.pool == "train" and not need.loading)
    return dict(dict(need.instants)[instant])


@pytest.mark.parametrize(("config", "billions", "active"), [(QWEN3_8B, 8.19, 7.57), (QWEN3_30B_A3B, 30.5, 3.0)])
def test_a_config_gives_the_published_number_of_parameters(config: dict[str, object], billions: float, active: float) -> None:
    shape = ModelShape.from_config(config)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


def test_a_config_of_another_kind_gives_no_shape_and_no_estimate(tmp_path: Path) -> None:
    assert ModelShape.from_config({"model_type": "speech", "hidden_size": 8}) is None
    plan = rg.compile(loop(folder(tmp_path / "m", {"hidden_size": 8})), rg.Cluster(gpus=2, gpu="H100"))
    assert plan.memory == ()
    assert plan.prediction.cost == "nominal"


def test_a_folder_that_is_written_again_is_planned_as_it_is_now(tmp_path: Path) -> None:
    weights = []
    for config in (QWEN3_8B, QWEN3_8B | {"num_hidden_layers": 18}):
        plan = rg.compile(loop(folder(tmp_path / "m", config)), rg.Cluster(gpus=8))
        weights.append(parts(plan, "a GPU of 'train'")["weights"])
        shape = ModelShape.from_config(config)
        assert shape is not None
        assert weights[-1] == shape.parameters  # 4 bytes each on 4 GPUs
    assert weights[0] > 1.7 * weights[1]


def test_training_states_are_sharded_and_an_engine_holds_its_weights(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    plan = rg.compile(loop(model, tensor_parallel=2), rg.Cluster(gpus=8))
    count = ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    train, rollout = parts(plan, "a GPU of 'train'"), parts(plan, "a GPU of 'rollout'")
    assert (train["weights"], train["optimizer"], train["gradients"]) == (4 * count // 4, 8 * count // 4, 4 * count // 4)
    assert rollout["engine's weights"] == count  # 2 bytes each on 2 GPUs
    assert rollout["keys and values"] == pytest.approx(64 * 4096 * 147456 / 2)
    assert train["weights in staging"] == 2 * 2 * count // 4  # of depth 1 two versions, 2 bytes each
    assert "host" not in {need.place for need in plan.memory}


def test_a_second_buffer_is_a_second_copy_of_the_weights(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    one, two = (parts(rg.compile(loop(model, buffers=n), rg.Cluster(gpus=8)), "a GPU of 'rollout'")["engine's weights"] for n in (1, 2))
    assert two == 2 * one


def test_a_second_buffer_of_an_engine_over_gpus_lies_on_the_first_of_them(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    plan = rg.compile(loop(model, tensor_parallel=2, buffers=2), rg.Cluster(gpus=8))
    assert parts(plan, "a GPU of 'rollout'")["engine's weights"] == 3 * ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]


def test_the_base_of_merged_adapters_stays_beside_a_trainer_and_a_second_buffer_holds_an_adapter(tmp_path: Path) -> None:
    model, lora = folder(tmp_path / "m", QWEN3_8B), rg.LoRA(rank=32)
    size = AdapterSize.of(ModelShape.from_config(QWEN3_8B), 32, "all-linear")  # type: ignore[arg-type]
    cluster = rg.Cluster(gpus=2, gpu="H100")
    (shared,) = [n for n in rg.compile(loop(model, shared=True, adapter=lora), cluster).memory if n.pool == "shared" and not n.loading]
    found, count = dict(shared.parts), ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    assert found["base of merged adapters"] == 2 * size.matrices
    assert "optimizer" not in found  # they are away while the engine has the GPU
    assert shared.least_bytes >= 2 * size.matrices + found["weights"] + 2 * count  # while the engine has its weights, and while it sleeps
    one, two = (parts(rg.compile(loop(model, buffers=n, adapter=lora), cluster), "a GPU of 'rollout'") for n in (1, 2))
    assert two["engine's weights"] - one["engine's weights"] == size.bytes
    assert one["base of merged adapters"] == 2 * size.matrices


def test_what_sleeps_is_counted_on_the_host_where_models_time_share_gpus(tmp_path: Path) -> None:
    model, count = folder(tmp_path / "m", QWEN3_8B), ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    plan = rg.compile(loop(model, shared=True), rg.Cluster(gpus=8, gpu="H100"))
    assert parts(plan, "host")["asleep"] == pytest.approx(8 * 2 * count + 8 * count, rel=1e-6)  # an engine on each GPU, shards of moments
    many = parts(rg.compile(loop(model, shared=True), rg.Cluster(gpus=16, cpus=64, gpu="H100")), "host")["asleep"]
    assert many == pytest.approx((16 * 2 * count + 8 * count) / 2, rel=1e-6)
    lora = rg.compile(loop(model, shared=True, adapter=rg.LoRA(rank=32)), rg.Cluster(gpus=1, gpu="H100"))
    size = AdapterSize.of(ModelShape.from_config(QWEN3_8B), 32, "all-linear")  # type: ignore[arg-type]
    assert parts(lora, "host")["asleep"] == pytest.approx(2 * count + 8 * size.parameters, rel=1e-6)
    assert "host" not in {need.place for need in rg.compile(loop(model), rg.Cluster(gpus=8, gpu="H100")).memory}
    with pytest.raises(PlanError, match=r"on host, which has 100\.0 GiB: asleep 183\.\d GiB.*separate pools"):
        rg.compile(loop(model, shared=True), rg.Cluster(gpus=8, gpu="H100", host_memory_bytes=100 * GIB))


@pytest.mark.parametrize(("buffers", "versions"), [(1, 0), (2, 1)])
def test_a_worker_that_merges_adapters_knows_what_it_keeps_beside_its_weights(tmp_path: Path, buffers: int, versions: int) -> None:
    size = AdapterSize.of(ModelShape.from_config(QWEN3_8B), 32, "all-linear")  # type: ignore[arg-type]
    for adapter, expected in ((rg.LoRA(rank=32), 2 * size.matrices + versions * size.bytes), (None, None)):
        graph = loop(folder(tmp_path / "m", QWEN3_8B), buffers=buffers, adapter=adapter)
        specs = worker_specs(graph, rg.compile(graph, rg.Cluster(gpus=2, gpu="H100")), "jobs", b"", 60.0)
        assert {spec.worker.model: spec.merging_bytes for spec in specs if spec.model} == {"generator": expected, "policy": None}


@pytest.mark.parametrize(("depth", "buffers", "copies"), [(0, 1, 2), (1, 1, 3), (1, 2, 3), (2, 2, 4)])
def test_weights_from_another_host_are_carried_into_memory_of_the_generator(tmp_path: Path, depth: int, buffers: int, copies: int) -> None:
    model, cluster = folder(tmp_path / "m", QWEN3_8B), rg.Cluster(gpus=16, cpus=64)
    apart = loop(model, depth=depth, buffers=buffers, pools=(rg.Pool("rollout", gpus=8), rg.Pool("train", gpus=8)))
    near = loop(model, depth=depth, buffers=buffers, pools=(rg.Pool("rollout", gpus=4), rg.Pool("train", gpus=4)))
    plan, one_host = rg.compile(apart, cluster), rg.compile(near, cluster)
    assert [p.loops[0].transport for p in (plan, one_host)] == ["nccl", "peer"]
    count = ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    there, here = (parts(p, "a GPU of 'rollout'") for p in (plan, one_host))
    assert there["weights carried by NCCL"] == plan.loops[0].slots * 2 * count
    assert there["weights carried by NCCL"] + there["engine's weights"] == copies * 2 * count
    assert "weights carried by NCCL" not in here
    assert parts(plan, "a GPU of 'train'")["weights in staging"] == plan.loops[0].slots * 2 * count // 8


def test_a_generator_without_room_for_weights_of_another_host_is_refused_with_what_they_take(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    graph = loop(model, depth=3, pools=(rg.Pool("rollout", gpus=8), rg.Pool("train", gpus=8)))
    with pytest.raises(
        PlanError, match=r"at least 76\.\d GiB on a GPU of 'rollout', which has 76\.0 GiB: .*weights carried by NCCL 61\.0 GiB"
    ):
        rg.compile(graph, rg.Cluster(gpus=16, cpus=64, gpu_memory_bytes=76 * GIB))
    rg.compile(graph, rg.Cluster(gpus=16, cpus=64, gpu_memory_bytes=79 * GIB))


def test_models_of_one_pool_time_share_the_memory_that_only_their_own_nodes_need(tmp_path: Path) -> None:
    plan = rg.compile(loop(folder(tmp_path / "m", QWEN3_8B), shared=True), rg.Cluster(gpus=8))
    shared = parts(plan, "a GPU of 'shared'")
    assert ("keys and values" in shared) != ("activations" in shared)


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (2, {}, r"needs at least .* GiB on a GPU of 'train', which has 80.0 GiB: optimizer 61.0 GiB.*give that pool more devices"),
        (6, {"micro_batch_tokens": 4_000_000}, r"activations .* GiB.*lower micro_batch_tokens"),
    ],
)
def test_a_plan_that_cannot_fit_is_refused_with_the_largest_part_and_a_way_out(
    tmp_path: Path, gpus: int, options: dict[str, int], message: str
) -> None:
    graph = loop(folder(tmp_path / "m", QWEN3_8B), **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        rg.compile(graph, rg.Cluster(gpus=gpus, gpu_memory_bytes=80 * GIB))


@pytest.mark.parametrize("shared", [False, True])
def test_a_teacher_on_vllm_takes_its_weights_once_and_makes_room_for_those_it_takes_turns_with(tmp_path: Path, shared: bool) -> None:
    student = folder(tmp_path / "student", {**QWEN3_8B, "num_hidden_layers": 4, "hidden_size": 1024, "tie_word_embeddings": True})
    large = folder(tmp_path / "teacher", {**QWEN3_30B_A3B, "max_position_embeddings": 40960})
    cluster = rg.Cluster(gpus=1 if shared else 2, cpus=16, gpu="H100", gpu_memory_bytes=80 * 10**9)
    train = rg.Pool("train")

    def planned(trainer: str) -> rg.Plan:
        policy = rg.Policy(student, pool=train)
        teacher = rg.Teacher(large, pool=train if shared else rg.Pool("teacher"), trainer=trainer, dtype="bfloat16")
        rows = rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 4, policy)
        step = policy.update(rows, teacher.top_log_probs(rows, top_k=64), loss=rg.losses.DistillationLoss())
        return rg.compile(rg.Graph("distil", step.metrics), cluster)

    plan = planned("vllm")
    held = parts(plan, "a GPU of 'train'" if shared else "a GPU of 'teacher'")
    assert held["engine's weights"] == pytest.approx(2 * 30.5e9, rel=0.01)
    slept = {sleep.model: sleep.bytes for sleep in plan.sleeps}
    assert slept.get("teacher", 0) == (pytest.approx(2 * 30.5e9, rel=0.01) if shared else 0)
    with pytest.raises(PlanError, match="GiB"):
        planned("fsdp")  # in float32


def test_on_a_host_everything_is_in_its_memory(tmp_path: Path) -> None:
    graph = loop(folder(tmp_path / "m", QWEN3_8B))
    with pytest.raises(PlanError, match=r"on host, which has 24.0 GiB"):
        rg.compile(graph, rg.Cluster(cpus=2, host_memory_bytes=24 * GIB))


def test_an_engine_on_several_cores_of_a_host_holds_its_model_once(tmp_path: Path) -> None:
    graph = loop(folder(tmp_path / "m", QWEN3_8B))
    few, many = (rg.compile(graph, rg.Cluster(cpus=cpus)) for cpus in (2, 8))
    assert [sum(worker.threads for worker in plan.workers if worker.name == "generator") for plan in (few, many)] == [1, 4]
    for part in ("engine's weights", "keys and values"):
        assert parts(few, "host")[part] == parts(many, "host")[part]


def test_activations_are_at_most_those_of_the_whole_batch(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    small, large = (at(rg.compile(loop(model, micro_batch_tokens=n), rg.Cluster(gpus=128)), "head") for n in (8192, 1 << 30))
    assert small["activations"] == large["activations"] == 2 * 4096 * 4096 * 36 * 2  # two responses of 4096 tokens each


def test_tune_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)

    def build(tensor_parallel: int) -> rg.Graph:
        return loop(model, tensor_parallel=tensor_parallel, buffers=2)

    found = rg.tune(build, rg.Cluster(gpus=40, gpus_per_node=40, gpu_memory_bytes=31 * GIB), tensor_parallel=(1, 4))
    assert {tuned.settings["tensor_parallel"] for tuned in found} == {4}
    assert any("raise tensor_parallel" in reason for reason in found.left_out)


def test_without_costs_times_come_from_the_roofline_of_a_known_gpu(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    times = {}
    for gpu in ("NVIDIA H100 80GB HBM3", "A100"):
        plan = rg.compile(loop(model), rg.Cluster(gpus=8, gpu=gpu))
        assert plan.prediction.cost == "roofline"
        times[gpu] = {node.name: node.seconds for node in plan.nodes}
    h100, a100 = times.values()
    assert 3.35 / 2.039 < a100["update"] / h100["update"] < 989 / 312  # logits go by memory traffic, the rest by operations
    operations_s = 8 * 7.57e9 * 128 * rg.Sampling().max_tokens * 0.2945 / (989e12 * 0.4) / 4
    assert operations_s < h100["update"] < 1.5 * operations_s
    assert "nothing was measured" in str(plan)


def test_a_trainers_rank_loads_its_share_alone(tmp_path: Path) -> None:
    model, count = folder(tmp_path / "m", QWEN3_8B), ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    graph = loop(model, pools=(rg.Pool("rollout", gpus=2), rg.Pool("train", gpus=6)))
    plan = rg.compile(graph, rg.Cluster(gpus=8, host_memory_bytes=100 * GIB))
    assert parts(plan, "host while models load") == {"pieces of files of policy": 6 * PIECE_BYTES}
    places = {need.place for need in plan.memory}
    assert "a GPU of 'train' while models load" not in places  # what it holds later is more
    both = loading_peaks(graph, rg.Cluster(gpus=8), plan.workers, {model: ModelShape.from_config(QWEN3_8B)})  # type: ignore[dict-item]
    found = next(dict(need.parts) for need in both if need.pool == "train")
    assert found == {"weights of policy": -(-4 * count // 6), "pieces of files of policy": PIECE_BYTES}


def test_a_trainer_that_reads_the_whole_model_needs_room_for_it_on_each_rank(tmp_path: Path) -> None:
    model, count = folder(tmp_path / "m", QWEN3_8B), ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    spec = rg.extend.TrainerSpec(name="mine", load=no_trainer, settings=("micro_batch_tokens", "recompute"))
    graph = loop(model, pools=(rg.Pool("rollout", gpus=8), rg.Pool("train", gpus=16)), micro_batch_tokens=2048, trainer=spec)
    roomy = rg.compile(graph, rg.Cluster(gpus=24, gpus_per_node=24, gpu_memory_bytes=40 * GIB))
    assert parts(roomy, "a GPU of 'train' while models load") == {"whole weights of policy": 4 * count}
    assert parts(roomy, "host while models load") == {"whole weights of policy": 16 * 4 * count}
    later = next(need for need in roomy.memory if need.place == "a GPU of 'train'")
    assert later.least_bytes < 28 * GIB < 4 * count
    with pytest.raises(PlanError, match=r"at least 30\.\d GiB on a GPU of 'train' while models load.*an engine reads its whole model"):
        rg.compile(graph, rg.Cluster(gpus=24, gpus_per_node=24, gpu_memory_bytes=28 * GIB))
    with pytest.raises(PlanError, match=r"on host while models load, which has 100\.0 GiB: whole weights of policy 488\.\d GiB"):
        rg.compile(graph, rg.Cluster(gpus=24, gpus_per_node=24, host_memory_bytes=100 * GIB))


def test_models_that_share_a_gpu_load_beside_one_another(tmp_path: Path) -> None:
    model, count = folder(tmp_path / "m", QWEN3_8B), ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    graph, cluster = loop(model, shared=True, micro_batch_tokens=2048), rg.Cluster(gpus=16)
    shapes = {model: ModelShape.from_config(QWEN3_8B)}
    each = loading_peaks(graph, cluster, rg.compile(graph, cluster).workers, shapes)  # type: ignore[arg-type]
    assert next(dict(need.parts) for need in each if need.pool == "shared") == {
        "whole weights of generator": 2 * count,
        "weights of policy": 4 * count // 16,
        "pieces of files of policy": PIECE_BYTES,
    }


def logits_of(model: str, fused_head: bool | None, **settings: Any) -> rg.Graph:
    generator = rg.Generator(model, pool=rg.Pool("rollout"), max_context=4096)
    policy = rg.Policy(model, pool=rg.Pool("train"), fused_head=fused_head, **settings)
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=64), group_size=8)
    step = policy.update(rollout, rg.advantages(rollout, rg.reward(zero_reward, rollout), estimator=rg.GRPO()), loss=rg.ClippedLoss())
    return rg.Graph("logits", step.metrics)


def test_a_plan_that_fails_by_its_logits_names_the_setting_with_which_it_fits(tmp_path: Path) -> None:
    model, cluster = folder(tmp_path / "m", QWEN3_8B), rg.Cluster(gpus=64, gpu_memory_bytes=28 * GIB)
    few = {"recompute": True, "micro_batch_tokens": 40960}
    with pytest.raises(PlanError, match=r"logits \d+\.\d GiB.*; set fused_head=True, lower micro_batch_tokens, or raise tensor_parallel"):
        rg.compile(logits_of(model, False, **few), cluster)
    rg.compile(logits_of(model, True, **few), cluster)


def test_a_plan_that_fits_where_layers_recompute_names_the_least_of_it(tmp_path: Path) -> None:
    model, few = folder(tmp_path / "m", QWEN3_8B), {"fused_head": True, "micro_batch_tokens": 16384}

    def on_gpus_of(gpu_memory_bytes: int | None, recompute: Recompute = False) -> rg.Plan:
        return rg.compile(logits_of(model, recompute=recompute, **few), rg.Cluster(gpus=64, gpu_memory_bytes=gpu_memory_bytes))  # type: ignore[arg-type]

    def least(recompute: Recompute) -> int:
        return next(need.least_bytes for need in on_gpus_of(None, recompute).memory if need.pool == "train" and not need.loading)

    kept, part, whole = map(least, RECOMPUTE)
    assert whole < part < kept
    for limit, said in ((kept - 1, "set recompute='selective', with which it fits"), (part - 1, "set recompute=True, with which it fits")):
        with pytest.raises(PlanError, match=said):
            on_gpus_of(limit)
    with pytest.raises(PlanError, match="set recompute=True, with which it fits"):
        on_gpus_of(part - 1, "selective")
    with pytest.raises(PlanError, match=r"; lower micro_batch_tokens|; set fused|; give that pool|; set offload"):
        on_gpus_of(whole - 1)
    on_gpus_of(part, "selective")


def test_offloaded_moments_are_counted_on_the_host_and_make_a_refused_plan_fit(tmp_path: Path) -> None:
    model, count = folder(tmp_path / "m", QWEN3_8B), ModelShape.from_config(QWEN3_8B).parameters  # type: ignore[union-attr]
    few = {"recompute": True, "micro_batch_tokens": 4096}
    with pytest.raises(PlanError, match=r'optimizer \d+\.\d GiB.*; set offload="moments" or rg.AdamW'):
        rg.compile(logits_of(model, None, **few), rg.Cluster(gpus=2, gpu_memory_bytes=100 * GIB))
    plan = rg.compile(logits_of(model, None, offload="moments", **few), rg.Cluster(gpus=2, gpu_memory_bytes=100 * GIB))
    assert "optimizer" not in parts(plan, "a GPU of 'train'")
    assert parts(plan, "host")["optimizer"] == 8 * count
    with pytest.raises(PlanError, match=r"on host, which has 50\.0 GiB"):
        rg.compile(logits_of(model, None, offload="moments", **few), rg.Cluster(gpus=2, host_memory_bytes=50 * GIB))


def test_moments_are_not_offloaded_where_no_gpu_trains(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    with pytest.raises(PlanError, match="offload='moments', which frees memory of a GPU, but it trains on the host"):
        rg.compile(logits_of(model, None, offload="moments"), rg.Cluster(cpus=8))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_memory_size_that_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(PlanError, match="whole number of bytes above 0"):
        rg.Cluster(gpus=1, gpu_memory_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "refused"), [({"head_dim": 16}, True), ({"head_dim": 128}, False), ({"intermediate_size": [8, 8]}, False)]
)
def test_heads_that_vllm_does_not_know_on_host_cores_are_refused(change: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 288, "intermediate_size": 128}
    graph = loop(folder(tmp_path / "m", {**QWEN3_8B, **sizes, **change}))  # a list of sizes, as Gemma 3n has: nothing is estimated
    if not refused:
        rg.compile(graph, rg.Cluster(cpus=4))
        return
    with pytest.raises(PlanError, match=r"model of node 'rollout' has head_dim=16; on host cores its engine has kernels for 32, 64"):
        rg.compile(graph, rg.Cluster(cpus=4))
