"""The rows of the tables in README.md and docs/benchmarks.md: what was measured, its file and field, and one peer of each."""

from collections.abc import Mapping

import adapters_learning
import scale_tables
import staleness_tables
from between_hosts_rows import BETWEEN_HOSTS
from exact_rows import EXACT
from figures import Each, Figure, count, gigabytes, ms, percent, seconds, share, times
from mathematics_rows import MATHEMATICS, MATHEMATICS_IN_TEXT
from table import Row, table


def learned(what: str, file: str, script: str) -> list[Row]:
    """The rows of a run that learns: its reward, its seconds."""
    steps = {"steps": count(file, "step", reduce="count")}
    reward = "critic/rewards/mean"
    return [
        Row(f"{what}: mean reward of the last 4 of {{steps}} steps", share(file, reward, reduce="last 4"), script,
            "the first 4", share(file, reward, reduce="first 4"), steps),
        Row(f"{what}: all {{steps}} steps", seconds(file, "timing_s/step", form="{:.0f} s", reduce="sum"), script,
            "a step (median)", seconds(file, "timing_s/step", reduce="median"), steps),
    ]  # fmt: skip


def conversed(what: str, run: str) -> list[Row]:
    """The rows of a recipe with agents: its reward, its seconds."""
    at = ("agents_learning_cpu.json", "runs", run)
    steps = {"steps": count(*at, "steps")}
    return [
        Row(f"{what}: mean reward of the last 4 of {{steps}} steps", share(*at, "last"), "benchmarks/agents_learning.py",
            "the first 4", share(*at, "first"), steps),
        Row(f"{what}: all {{steps}} steps", seconds(*at, "steps_s", form="{:.0f} s"), "benchmarks/agents_learning.py",
            "a step (median)", seconds(*at, "step_s"), steps),
    ]  # fmt: skip


def until_learned(instructions: str) -> Row:
    """The row of the demo's seconds until it has learned, with some of the processor's instructions."""
    file, at = "demo_cpu.json", ("runs", instructions)
    return Row(f"`make demo`, {instructions}: seconds of steps until one has a mean reward of 0.90",
               seconds(file, *at, "seconds_until_0.90", form="{:.0f} s"), "benchmarks/demo.py",
               "a step (median)", seconds(file, *at, "median_step_s", form="{:.1f} s"))  # fmt: skip


def stale(what: str, file: str, script: str) -> list[Row]:
    return [Row(f"{what}: oldest token, in versions", count(file, "staleness/max", reduce="max"), script, "bound 2")]


HOPS, HOPS_BY_RAY = "channels_cpu.json", "channels_ray_cpu.json"  # the second is of a busier machine: compare rows of one run alone


def hop(transport: str, size: int, form: str = "{:.1f} ms", file: str = HOPS) -> Figure:
    return ms(file, "hops", {"transport": transport, "size": size}, "median_s", form=form)


MIB, BY_RAY = 1 << 20, "rlgraph ray"
PEERS_OF_HOPS = ("native edge", "native edge, zero-copy", "Ray object store", "Ray object store, zero-copy", "torch.multiprocessing queue")
HOP_SIZES = (
    ("1 KiB", 1 << 10, "{:.2f} ms"),
    ("1 MiB", MIB, "{:.2f} ms"),
    ("16 MiB", 16 * MIB, "{:.1f} ms"),
    ("256 MiB", 256 * MIB, "{:.0f} ms"),
)
CHANNELS = [
    *(
        Row("16 MiB from worker to worker", hop("rlgraph shm", 16 * MIB), "benchmarks/channels.py", peer, hop(peer, 16 * MIB))
        for peer in PEERS_OF_HOPS
    ),
    *(
        Row(f"{name} through `transport=\"ray\"`", hop(BY_RAY, size, form, HOPS_BY_RAY), "benchmarks/channels.py",
            other, hop(other, size, form, HOPS_BY_RAY))
        for name, size, form in HOP_SIZES
        for other in ("rlgraph shm", f"{BY_RAY}, zero-copy", "rlgraph tcp")
    ),
    *BETWEEN_HOSTS,
    Row("1 KiB there and back", ms(HOPS, "round_trips", {"transport": "rlgraph shm"}, "median_s", form="{:.2f} ms"),
        "benchmarks/channels.py", "torch queue", ms(HOPS, "round_trips", {"transport": "torch.multiprocessing queue"}, "median_s")),
    Row("share of a core of a worker that waits", percent(HOPS, "waiting", "rlgraph shm"), "benchmarks/channels.py",
        "native edge", percent(HOPS, "waiting", "native edge", form="{:.0f} %")),
    Row("share of a core of a worker that waits, `transport=\"ray\"`", percent(HOPS_BY_RAY, "waiting", BY_RAY), "benchmarks/channels.py",
        "native edge", percent(HOPS_BY_RAY, "waiting", "native edge", form="{:.0f} %")),
    Row("an empty step of 4 workers", ms("dispatch_cpu.json", "empty step, Compiled Graph", "median_s", form="{:.2f} ms"),
        "benchmarks/dispatch.py", "plain actor calls",
        ms("dispatch_cpu.json", "empty step, plain actor calls", "median_s", form="{:.2f} ms")),
]  # fmt: skip

LEARNING = [
    *learned("`make demo`: SmolLM2 learns to add, one step off", "one_step_off_cpu.jsonl", "recipes/one_step_off.py"),
    *map(until_learned, ("all instructions", "AVX2 alone")),
    Row("SmolLM2, one step off: from the command to the end of the first step", seconds("start_cpu.json", "median_s", form="{:.0f} s"),
        "benchmarks/start.py"),
    *learned("PPO with a critic", "ppo_cpu.jsonl", "recipes/ppo.py"),
    *learned("calls of a calculator, beside other work", "tools_cpu.jsonl", "recipes/tools.py"),
    Row("calls of 32 that fail, last 4 steps", count("tools_cpu.jsonl", "tools/failures", form="{:.1f}", reduce="last 4"),
        "recipes/tools.py", "first 4 steps", count("tools_cpu.jsonl", "tools/failures", form="{:.1f}", reduce="first 4")),
    *conversed("a program of the `openai` client, beside other work", "agent, seed 0"),
    *learned("depth 2", "k_step_off_cpu.jsonl", "recipes/k_step_off.py"),
    *stale("depth 2", "k_step_off_cpu.jsonl", "recipes/k_step_off.py"),
    *learned("interrupted for new weights, depth 2", "interrupt_cpu.jsonl", "recipes/interrupt.py"),
    *stale("interrupted for new weights, depth 2", "interrupt_cpu.jsonl", "recipes/interrupt.py"),
    *learned("continuous batching over steps, depth 2", "continuous_cpu.jsonl", "recipes/continuous.py"),
    *stale("continuous batching over steps, depth 2", "continuous_cpu.jsonl", "recipes/continuous.py"),
    *MATHEMATICS,
]  # fmt: skip


def pools(of: str) -> Row:
    file, what = "log_prob_pools_cpu.json", of.replace("rollout", "with a rollout of").replace("reference", "a reference of")
    return Row(f"log-probs on a pool of their own over on the trainer's, stages that wait, {what.replace('update', 'an update of')}",
               share(file, of, "ratio"), "benchmarks/log_prob_pools.py", "predicted", share(file, of, "predicted_ratio"))  # fmt: skip


POOLS = (
    "depth 1, rollout 0.3 s, reference 0.15 s, update 0.15 s",
    "depth 1, rollout 0.2 s, reference 0.2 s, update 0.2 s",
    "depth 2, rollout 0.2 s, reference 0.2 s, update 0.2 s",
    "depth 2, rollout 0.1 s, reference 0.2 s, update 0.3 s",
    "depth 2, rollout 0.2 s, reference 0.3 s, update 0.1 s",
)
WAITING = {
    "depth 1, update 0.0 of a step": "depth 1, an update of 0 s",
    "depth 1, update 0.3 of a step": "depth 1, an update of 0.3 of a step",
    "depth 2, update 0.3 of a step": "depth 2, an update of 0.3 of a step",
}


def rollouts(file: str, model: str) -> list[Row]:
    """Continuous rollouts against batch by batch, with every update that was tried."""
    ways = {"continuous": "continuous rollout", "continuous, recompute": "continuous, interrupted for new weights"}
    return [
        Row(f"{what} over batch by batch, lengths with p99 = 10 medians, {model}, {told}", times(file, at, way, "speed"),
            "benchmarks/rollout.py", "the slowest round", share(file, at, way, "speed_min"))
        for way, what in ways.items()
        for at, told in WAITING.items()
    ]  # fmt: skip


def turns(file: str, what: str) -> list[Row]:
    return [Row(f"64 conversations of up to 4 turns, {what}: tokens/s over the same without tools", share(file, "ratio"),
                "benchmarks/tool_rollouts.py", "without tools, tokens/s", count(file, "without"))]  # fmt: skip


STAGES = [
    *map(pools, POOLS),
    Row("a reward of a third of generation, one step off, `chunks=1`: a step over max(generate, update)",
        share("slow_rewards_cpu.json", "depth 1, chunks 1", "of_bound"), "benchmarks/slow_rewards.py",
        "`chunks=4`", share("slow_rewards_cpu.json", "depth 1, chunks 4", "of_bound")),
    Row("weights that take 0.9 of a step to arrive, depth 1: a step over its bound",
        share("slow_weights_cpu.json", "depth 1, buffers 2", "of_the_bound"), "benchmarks/slow_weights.py",
        "depth 2", share("slow_weights_cpu.json", "depth 2, buffers 2", "of_the_bound")),
    *rollouts("rollout_cpu.json", "a tiny model"),
    *turns("tool_rollouts_smollm2_cpu.json", "SmolLM2's shape, turns of 43 tokens"),
    *turns("tool_rollouts_long_turns_cpu.json", "SmolLM2's shape, turns of 170 tokens"),
    *turns("tool_rollouts_cpu.json", "a tiny model, turns of 43 tokens"),
]  # fmt: skip

PREDICTED = "prediction_cpu.json"
JOINED = "joined_rollout.json"
CONFIGURATIONS = {"count": count(PREDICTED, "configurations", Each(), "name", reduce="count")}
ACCURATE = [
    Row("a step predicted before the run, {count} configurations: median error", percent(PREDICTED, "median_error"),
        "benchmarks/prediction.py", "worst", percent(PREDICTED, "worst_error"), CONFIGURATIONS),
    Row("pairs of a synchronous and an asynchronous way whose faster one was predicted", count(PREDICTED, "signs_right"),
        "benchmarks/prediction.py", "pairs", count(PREDICTED, "signs")),
    Row("of these, pairs that the synchronous way wins", count(PREDICTED, "signs_right_where_async_loses"),
        "benchmarks/prediction.py", "pairs", count(PREDICTED, "signs_where_async_loses")),
    Row("measured step of the plan predicted to be best, over that of the best, worst of all works",
        times(PREDICTED, "predicted best over measured best", form="{:.3f}", reduce="max"), "benchmarks/prediction.py"),
    Row("a batch of vLLM on an H200 where batches or weights join, from its seconds batch by batch alone, {count} ways: median error",
        percent(JOINED, "rollout_h200.json", "median_error"), "benchmarks/joined_rollout.py",
        "worst", percent(JOINED, "rollout_h200.json", "worst_error"),
        {"count": count(JOINED, "rollout_h200.json", "ways", Each(), "way", reduce="count")}),
    Row("the same of a tiny model on two cores, all time given to decode steps",
        percent(JOINED, "rollout_cpu.json, steps alone", "median_error"),
        "benchmarks/joined_rollout.py", "worst", percent(JOINED, "rollout_cpu.json, steps alone", "worst_error")),
    Row("published synchronous step over that predicted from its published stages, farthest of all",
        share("seed_tables.json", "rows", Each({"kind": "sync"}), "ratio", form="{:.3f}", reduce="farthest from 1"),
        "benchmarks/seed_tables.py", "rows", count("seed_tables.json", "rows", Each({"kind": "sync"}), "ratio", reduce="count")),
    Row("the same of asynchronous steps", share("seed_tables.json", "rows", Each({"kind": "async"}), "ratio", form="{:.3f}",
        reduce="farthest from 1"), "benchmarks/seed_tables.py",
        "rows", count("seed_tables.json", "rows", Each({"kind": "async"}), "ratio", reduce="count")),
    Row("period of the plan chosen by `rg.tune` over the best of all plans, 2 to 16 GPUs, at most",
        share("tune.json", "worst_apart", form="1 + {:.0e}"), "benchmarks/tune.py"),
    Row("a step estimated where nothing was measured, over or under the one it took on H200s, {runs} runs held out: median factor",
        share("a_priori_h200.json", "median_factor_held_out"), "benchmarks/a_priori.py",
        "worst", share("a_priori_h200.json", "worst_factor_held_out"), {"runs": count("a_priori_h200.json", "held_out")}),
    Row("`rg.tune` of {plans} plans", seconds("tune.json", "tune_s", "median"), "benchmarks/tune.py",
        words={"plans": count("tune.json", "tune_s", "candidates")}),
    Row("`rg.compile` of 20 nodes", ms("tune.json", "compile_20_nodes_s", "median"), "benchmarks/tune.py"),
]  # fmt: skip

CHECKPOINTS, SOAK, KILLS, FAULTS = "checkpoint_cost_cpu.json", "soak_cpu.json", "kills_cpu.json", "injected_faults_cpu.json"


def growth(process: str) -> Row:
    held = "second and last quarter", process, "rss_kib"
    return Row(f"memory of {process}, from the second to the last quarter of {{steps}} steps at depth 2, {{all}}",
               Figure(SOAK, (*held, 1), "{:,.0f} KiB"), "benchmarks/soak.py", "before", Figure(SOAK, (*held, 0), "{:,.0f} KiB"),
               {"steps": count(SOAK, "steps"), "all": seconds(SOAK, "seconds", form="{:.0f} s")})  # fmt: skip


def kills(mode: str, told: str) -> Row:
    where = "parts", Each({"mode": mode})
    return Row(f"SIGKILLs at random times, {told}: the run goes on, and every batch and weight is that of the undisturbed run",
               count(KILLS, *where, "kills in all", reduce="sum"), f"benchmarks/kills.py {mode}",
               "findings", count(KILLS, *where, "wrong", reduce="items"))  # fmt: skip


def faults(on: str, told: str) -> Row:
    return Row(f"faults injected into every stage, {told}: the first line of the error names the culprit, or a slow one is warned about",
               count(FAULTS, on, "first line names the culprit"), f"benchmarks/injected_faults.py {on}", "faults",
               count(FAULTS, on, "faults"))  # fmt: skip


RELIABLE = [
    Row("every order of firing of all training graphs of up to 5 nodes: states, none with a broken bound or a deadlock",
        count("model_check.json", "states_in_all"), "benchmarks/model_check.py"),
    kills("here", "one process"),
    kills("ray", "worker, driver and Ray's own processes on Ray"),
    faults("forked", "forked workers"),
    faults("ray", "workers on Ray"),
    Row("malformed inputs to channels and driver", count("fuzz_cpu.json", Each(), "cases", reduce="sum"), "benchmarks/fuzz.py",
        "codes that ran", count("fuzz_cpu.json", "code that ran", reduce="count")),
    Row("a checkpoint of {size} every 10 steps, SmolLM2: training stalled, of the time",
        percent(CHECKPOINTS, "training stalled, share of ten steps (median)"), "benchmarks/checkpoint_cost.py",
        words={"size": Figure(CHECKPOINTS, ("bytes of a checkpoint",), "{:.1f} GB", 1e-9)}),
    Row("ten steps with that checkpoint, written beside them, over ten without: the first",
        share(CHECKPOINTS, "ten steps with a checkpoint over ten without", 0), "benchmarks/checkpoint_cost.py",
        "the second", share(CHECKPOINTS, "ten steps with a checkpoint over ten without", 1)),
    *map(growth, ("generator", "policy", "driver")),
    Row("step time of that run, last quarter", ms(SOAK, "step_s", "last quarter", form="{:.2f} ms"), "benchmarks/soak.py",
        "second quarter", ms(SOAK, "step_s", "second quarter", form="{:.2f} ms")),
]  # fmt: skip


def peer_job(what: str, at: str, peer: str, script: str) -> Row:
    return Row(f"SmolLM2-135M, 1024 responses of {what}, two H200: a step", seconds("peer_job_h200.json", at, "step_s", form="{:.1f} s"),
               script, "verl 0.9.1", seconds(peer, "wall_s", form="{:.1f} s"))  # fmt: skip


PEERS = [
    peer_job("1024 tokens, one step off", "one_step_off", "verl_one_step_off_h200.json", "benchmarks/peer_job.py"),
    peer_job("1024 tokens, time-shared on both", "colocated", "verl_colocated_h200.json", "benchmarks/peer_job.py mode=colocated"),
    peer_job("64 tokens, one step off", "one_step_off_64_tokens", "verl_one_step_off_64_tokens_h200.json",
             "benchmarks/peer_job.py response_tokens=64"),
    Row("4B, 256 responses of 1024 tokens, one step off, two H200: a step",
        seconds("peer_job_4b_h200.json", "one_step_off", "step_s", form="{:.1f} s"), "benchmarks/peer_job.py model=4B", "verl 0.9.1",
        seconds("verl_4b_h200.json", "wall_s", form="{:.1f} s")),
]  # fmt: skip


def generation(model: str, file: str) -> Row:
    best = Figure(file, ("seconds", "rlgraph, 4 engines" if model == "SmolLM2" else "rlgraph, 1 engine"), "{:.1f} s")
    return Row(f"{model}, {{sequences}} responses of {{tokens}} tokens with log-probs, one GPU", best, "benchmarks/generation.py",
               "`LLM.generate` with log-probs", seconds(file, "seconds", "vllm, with log-probs", form="{:.1f} s"),
               {"sequences": count(file, "sequences"), "tokens": count(file, "tokens")})  # fmt: skip


def weights(shape: str) -> list[Row]:
    file, at = "weights_h200.json", ("shapes", shape)
    return [
        Row(f"{shape} weights, GPU to GPU into a second buffer while decoding", Figure(file, (*at, "gb_per_s"), "{:.0f} GB/s"),
            "benchmarks/weights.py", "plain copy", Figure(file, ("raw_copy_gb_per_s",), "{:.0f} GB/s")),
        Row(f"{shape} weights on H200: decoding stopped by the swap", ms(file, *at, "median", "decode_gap_s"), "benchmarks/weights.py",
            "vLLM's own NCCL transfer", ms(file, *at, "vllm_decode_gap_s", form="{:.0f} ms")),
        Row(f"{shape} weights: trainer stalled", ms(file, *at, "median", "trainer_stall_s"), "benchmarks/weights.py",
            "vLLM's own NCCL transfer", ms(file, *at, "vllm_trainer_stall_s", form="{:.0f} ms")),
        Row(f"{shape} weights: from publish to staged", ms(file, *at, "median", "staged_s"), "benchmarks/weights.py"),
    ]  # fmt: skip


def training(spec: str, what: str) -> Row:
    file = "training_h200.json"
    return Row(f"training {what}, packed 4k sequences: MFU of {{peak}} TFLOP/s", percent(file, "runs", spec, "mfu", form="{:.0f} %"),
               f"benchmarks/training.py {spec}", "tokens/s", count(file, "runs", spec, "tokens_per_s"),
               {"peak": Figure(file, ("peak_flop_per_s",), "{:.0f}", 1e-12)})  # fmt: skip


def overlap(file: str, what: str) -> list[Row]:
    """A step one step off, over its bound, and beside the same plan time-shared."""
    found = [Row(f"{what}, lengths with p99 6.6 medians, one step off: a step over max(generate, train)",
                 share(file, "step_over_bound"), "benchmarks/overlap.py", "a step", seconds(file, "one_step_off", "step_s"))]  # fmt: skip
    if what.startswith("0.6B on 1"):
        found += [
            Row(f"{what}, time-shared on both: a step", seconds(file, "colocated", "step_s"), "benchmarks/overlap.py",
                "predicted before it from the run one step off", seconds(file, "predicted_colocated_s")),
            Row(f"{what}, the same one step off: a step", seconds(file, "one_step_off", "step_s"), "benchmarks/overlap.py",
                "fitted to its own nodes", seconds(file, "fitted_one_step_off_s")),
        ]  # fmt: skip
    return found


ON_GPUS = [
    *PEERS,
    Row("SmolLM2-135M, 1024 tokens, one step off: a step", seconds("peer_job_h200.json", "one_step_off", "step_s", form="{:.1f} s"),
        "benchmarks/peer_job.py", "estimated with nothing measured",
        seconds("peer_job_h200.json", "one_step_off", "predicted_s", form="{:.1f} s")),
    Row("SmolLM2-135M, 1024 tokens, time-shared on both: a step", seconds("peer_job_h200.json", "colocated", "step_s", form="{:.1f} s"),
        "benchmarks/peer_job.py mode=colocated costs=…", "predicted before it from the run one step off",
        seconds("peer_job_h200.json", "colocated", "predicted_s", form="{:.1f} s")),
    Row("log-probs and their gradient, 8192 rows of 151,936 logits",
        ms("kernels_h200.json", "log_probs", "rlgraph", "seconds"), "benchmarks/kernels.py", "Liger, logits as float32",
        ms("kernels_h200.json", "log_probs", "liger, float32", "seconds")),
    Row("the same: memory", gigabytes("kernels_h200.json", "log_probs", "rlgraph", "bytes"), "benchmarks/kernels.py",
        "Liger, logits as float32", gigabytes("kernels_h200.json", "log_probs", "liger, float32", "bytes")),
    Row("the same: worst error in nats", share("kernels_h200.json", "log_probs", "rlgraph", "worst_error_nats", form="{:.6f}"),
        "benchmarks/kernels.py",
        "Liger, logits as bfloat16", share("kernels_h200.json", "log_probs", "liger", "worst_error_nats", form="{:.6f}")),
    Row("RMS norm and its gradients, 8192 × 2560",
        ms("kernels_h200.json", "rms_norm, hidden of 4B", "rlgraph (torch's kernel)", "seconds", form="{:.2f} ms"),
        "benchmarks/kernels.py", "Liger", ms("kernels_h200.json", "rms_norm, hidden of 4B", "liger", "seconds", form="{:.2f} ms")),
    generation("SmolLM2", "generation_h200.json"),
    generation("4B", "generation_4b_h200.json"),
    Row("0.6B time-shared, one GPU: from the command to the end of the first step", seconds("start_h200.json", "median_s", form="{:.0f} s"),
        "benchmarks/start.py --shape 0.6B"),
    *(row for shape in ("8B", "0.6B") for row in weights(shape)),
    *(
        Row(f"{shape} into an engine over two GPUs, one of them the trainer's: decoding stopped",
            ms("weights_two_gpus_h200.json", "shapes", shape, "median", "decode_gap_s"), "benchmarks/weights.py --tensor-parallel 2")
        for shape in ("8B", "0.6B")
    ),
    Row("8B from 2 sharded ranks to 2 engines", Figure("sharded_weights_h200.json", ("shapes", "8B", "2 to 2", "median", "gb_per_s"),
        "{:.0f} GB/s"), "benchmarks/sharded_weights.py", "from 1 to 1",
        Figure("sharded_weights_h200.json", ("shapes", "8B", "1 to 1", "median", "gb_per_s"), "{:.0f} GB/s")),
    training("4B:1:compiled", "4B on one GPU, compiled"),
    training("4B:1", "4B on one GPU, eager"),
    training("8B:2:compiled", "8B on two, compiled"),
    *overlap("overlap_h200.json", "0.6B on 1 + 1 GPUs"),
    *overlap("overlap_4b_four_gpus_h200.json", "4B on 2 + 2 GPUs"),
    Row("steps of {count} configurations of 1.7B and 4B, fitted afterwards to profiles taken before: median error",
        percent("prediction_h200.json", "fit_median_error"), "benchmarks/prediction_gpu.py --again",
        "worst", percent("prediction_h200.json", "fit_worst_error"), {"count": count("prediction_h200.json", "configurations_measured")}),
    *learned("SmolLM2 learns to add, one step off", "one_step_off_h200.jsonl", "recipes/one_step_off.py"),
    *rollouts("rollout_h200.json", "SmolLM2"),
    *turns("tool_rollouts_h200.json", "SmolLM2, turns of 43 tokens, tools of 20 ms"),
    *turns("tool_rollouts_long_turns_h200.json", "SmolLM2, turns of 170 tokens, tools of 20 ms"),
    Row("the same with turns of 43 tokens and tools whose 99th percentile is 10 medians: a step over its bound",
        share("tool_rollouts_tail_h200.json", "step_over_bound"), "benchmarks/tool_rollouts.py --tail 10",
        "of it the engine was idle while a conversation could decode",
        percent("tool_rollouts_tail_h200.json", "engine_idle_while_any_could_decode")),
    Row("8B into a trainer on one GPU", seconds("loading_h200.json", "runs", "8B:1", "seconds", form="{:.1f} s"),
        "benchmarks/loading.py 8B:1",
        "reading its files twice", seconds("loading_h200.json", "runs", "8B:1", "read_twice_s", form="{:.1f} s")),
]  # fmt: skip

# The ten of README.md: the first ten that are measured.
TEN = [
    LEARNING[0],
    PEERS[0],
    PEERS[1],
    generation("4B", "generation_4b_h200.json"),
    generation("SmolLM2", "generation_h200.json"),
    training("4B:1:compiled", "4B on one H200, compiled"),
    weights("8B")[0],
    CHANNELS[1],
    CHANNELS[-1],
    ACCURATE[0],
    kills("ray", "worker, driver and Ray's own processes"),
    STAGES[5],
    ACCURATE[8],
]

# Figures in running text, by the name in their comment.
FIGURES: Mapping[str, Figure] = MATHEMATICS_IN_TEXT | {
    "hop-shm": hop("rlgraph shm", 16 * MIB, file=HOPS_BY_RAY),
    "hop-ray": hop(BY_RAY, 16 * MIB, file=HOPS_BY_RAY),
    "two-gpus-gap": ms("weights_two_gpus_h200.json", "shapes", "8B", "median", "decode_gap_s", form="{:.0f} ms"),
    "tools-smollm2": share("tool_rollouts_smollm2_cpu.json", "ratio"),
    "tools-tiny": share("tool_rollouts_cpu.json", "ratio"),
    "interrupt-speed": share("rollout_cpu.json", "depth 1, update 0.0 of a step", "interrupt, recompute", "speed"),
    "a-priori-median": times("a_priori_h200.json", "median_factor_held_out"),
    "a-priori-worst": times("a_priori_h200.json", "worst_factor_held_out"),
    "overlap-predicted": seconds("overlap_h200.json", "predicted_colocated_s"),
    "overlap-time-shared": seconds("overlap_h200.json", "colocated", "step_s"),
    "overlap-ahead": seconds("overlap_h200.json", "one_step_off", "step_s"),
    "prediction-median": percent(PREDICTED, "median_error"),
    "prediction-worst": percent(PREDICTED, "worst_error"),
    "prediction-h200-median": percent("prediction_h200.json", "fit_median_error"),
    "prediction-h200-worst": percent("prediction_h200.json", "fit_worst_error"),
}

# Results that nobody has measured yet: their rows, or the peers in them, come with the file.
AWAITED = ("verl_one_step_off_64_tokens_h200.json", "verl_4b_h200.json", "peer_job_4b_h200.json")

HEAD = ("what", "measured", "beside it", "script")


def tables() -> tuple[dict[str, str], list[str]]:
    """Return every table by its name, and what is declared but not measured."""
    groups = {"channels": CHANNELS, "learning": LEARNING, "stages": [*STAGES, *EXACT],
              "accuracy": ACCURATE, "reliability": RELIABLE, "gpus": ON_GPUS}  # fmt: skip
    found, missing = scale_tables.tables() | staleness_tables.tables() | adapters_learning.tables(), []
    for name, rows in groups.items():
        found[name], left_out = table((*HEAD, "file: field"), rows, 5)
        missing += left_out
    found["ten"], _ = table(HEAD, TEN, 4, most=10)
    return found, missing
