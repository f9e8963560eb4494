"""The rows of measurements on GPUs."""

from benchmarks.lib.figures import Figure, count, gigabytes, ms, percent, seconds, share
from benchmarks.report.learning_rows import learned
from benchmarks.report.stage_rows import TURNS_ON_H200, rollouts
from benchmarks.report.table import Row


def peer_job(what: str, at: str, script: str) -> Row:
    """A job of which no peer was timed for five steps."""
    return Row(f"SmolLM2-135M, 1024 responses of {what}, two H200: a step", seconds("peer_job_h200.json", at, "step_s", form="{:.1f} s"),
               script)  # fmt: skip


def beside(what: str, run: str, peer: str, file: str, step: str = "step_s") -> Row:
    """A step on H200s, right before or after a peer's on the same GPUs."""
    return Row(
        f"{what}: a step, median of {{steps}}",
        seconds("announced_h200.json", run, "step_s", form="{:.1f} s"),
        f'benchmarks/prediction/announced.py run "{run}"',
        f"{peer}, median of {{peer_steps}}",
        seconds(file, step, form="{:.1f} s"),
        {"steps": count("announced_h200.json", run, "steps_timed"), "peer_steps": count(file, "steps_timed")},
    )


BATCH = "256 responses of 1,024 tokens"
BESIDE_PEERS = [
    beside(f"4B, {BATCH}, one step off on 1 + 1 H200", "4B, one step off", "verl 0.9.1", "verl_one_step_off_4b_h200.json", "wall_s"),
    beside(f"4B, {BATCH}, on policy, time-shared on two H200", "4B, time-shared on both", "verl 0.9.1, colocated",
           "verl_colocated_4b_h200.json", "wall_s"),
    beside(f"1.7B, {BATCH}, on policy on one H200", "1.7B, one engine", "TRL 1.16 with Liger", "trl_1.7b_h200.json"),
    beside(f"4B by an adapter of rank 32, {BATCH}, on policy on one H200", "4B by an adapter, compiled", "TRL 1.16 with PEFT and Liger",
           "trl_4b_adapter_h200.json"),
    Row(f"Qwen2.5-VL's 3B shape, {BATCH}, an image of 512 x 512 in each prompt, on policy on one H200: a step, median of {{steps}}",
        seconds("images_h200.json", "rlgraph", "step_s", form="{:.1f} s"),
        "benchmarks/peers/peer_job.py mode=colocated model=3B-VL image=512 prompts=32 engines_per_gpu=1 micro_batch_tokens=12288 "
        "compiled=true", "TRL 1.16 with Liger, median of {peer_steps}",
        seconds("trl_3b_images_h200.json", "step_s", form="{:.1f} s"),
        {"steps": count("images_h200.json", "rlgraph", "steps_timed"), "peer_steps": count("trl_3b_images_h200.json", "steps_timed")}),
]  # fmt: skip
PEERS = [
    *BESIDE_PEERS,
    peer_job("1024 tokens, one step off", "one_step_off", "benchmarks/peers/peer_job.py"),
    peer_job("1024 tokens, time-shared on both", "colocated", "benchmarks/peers/peer_job.py mode=colocated"),
    peer_job("64 tokens, one step off", "one_step_off_64_tokens", "benchmarks/peers/peer_job.py response_tokens=64"),
]  # fmt: skip


def generation(model: str, file: str, vllm: str, compared: str) -> Row:
    """One engine that generates, beside vLLM as its users start it, measured in `vllm`."""
    what = f"{model}, {{sequences}} responses of {{tokens}} tokens with log-probs, one engine"
    return Row(f"{what} (one vLLM without log-probs: {{plain}})", seconds(file, "seconds", "rlgraph, 1 engine", form="{:.1f} s"),
               "benchmarks/speed/generation.py", compared, seconds(vllm, "seconds", "vllm, with log-probs", form="{:.1f} s"),
               {"sequences": count(file, "sequences"), "tokens": count(file, "tokens"),
                "plain": seconds(vllm, "seconds", "vllm", form="{:.1f} s")})  # fmt: skip


def decode_step(model: str, sequences: int) -> Row:
    """A decode step of rlgraph's engine beside one that vLLM schedules in its own way, in the same engine."""
    file, at = f"decode_steps_{model.lower()}_{sequences}_h200.json", ("ways", "recorded")
    shape = model.lower() if model == "SmolLM2" else model
    what = f"{model}, {{sequences}} responses, at 512 of 1,024 tokens: a decode step (the GPU is busy for {{busy}})"
    return Row(what, ms(file, *at, "step_s"), f"benchmarks/speed/decode_steps.py {shape} --sequences {sequences} --ways recorded",
               "scheduled in vLLM's own way", ms(file, *at, "own_scheduler_step_s"),
               {"sequences": count(file, "sequences"), "busy": ms(file, *at, "gpu_busy_s")})  # fmt: skip


def weights(shape: str) -> list[Row]:
    file, at = "weights_h200.json", ("shapes", shape)
    return [
        Row(f"{shape} weights, GPU to GPU into a second buffer while decoding", Figure(file, (*at, "gb_per_s"), "{:.0f} GB/s"),
            "benchmarks/speed/weights.py", "plain copy", Figure(file, ("raw_copy_gb_per_s",), "{:.0f} GB/s")),
        Row(f"{shape} weights on H200: decoding stopped by the swap", ms(file, *at, "median", "decode_gap_s"),
            "benchmarks/speed/weights.py",
            "vLLM's own NCCL transfer", ms(file, *at, "vllm_decode_gap_s", form="{:.0f} ms")),
        Row(f"{shape} weights: trainer stalled", ms(file, *at, "median", "trainer_stall_s"), "benchmarks/speed/weights.py",
            "vLLM's own NCCL transfer", ms(file, *at, "vllm_trainer_stall_s", form="{:.0f} ms")),
        Row(f"{shape} weights: from publish to staged", ms(file, *at, "median", "staged_s"), "benchmarks/speed/weights.py"),
    ]  # fmt: skip


def training(spec: str, what: str) -> Row:
    file = "training_h200.json"
    return Row(f"training {what}, packed 4k sequences: MFU of {{peak}} TFLOP/s", percent(file, "runs", spec, "mfu", form="{:.0f} %"),
               f"benchmarks/speed/training.py {spec}", "tokens/s", count(file, "runs", spec, "tokens_per_s"),
               {"peak": Figure(file, ("peak_flop_per_s",), "{:.0f}", 1e-12)})  # fmt: skip


def flash(spec: str, what: str) -> Row:
    """The same by FlashAttention 4, beside 2."""
    four, two = (f"training_flash{number}_h200.json" for number in (4, 2))
    mfu = [percent(file, "runs", spec, "mfu", form="{:.0f} %") for file in (four, two)]
    return Row(f"training {what} by FlashAttention 4, packed 4k sequences: MFU of 989 TFLOP/s", mfu[0],
               f"benchmarks/speed/training.py {spec}", "by FlashAttention 2", mfu[1])  # fmt: skip


def recomputed(file: str, shape: str) -> list[Row]:
    """An update whose layers keep all, a part or nothing for the backward pass."""
    ways = {"activations kept": "compiled", '`recompute="selective"`': "selective:compiled", "`recompute=True`": "recompute:compiled"}
    return [
        Row(f"training {shape} on one GPU, compiled, {what}: an update of 8 sequences of 4,096 tokens",
            seconds(file, "runs", f"{shape}:1:{way}", "step_s"), f"benchmarks/speed/training.py {shape}:1:{way}",
            "peak", gigabytes(file, "runs", f"{shape}:1:{way}", "peak_bytes"))
        for what, way in ways.items()
    ]  # fmt: skip


def overlap(file: str, what: str) -> list[Row]:
    """A step one step off, over its bound, and beside the same plan time-shared."""
    found = [Row(f"{what}, long-tailed lengths (p99 = 6.6 x median), one step off: step time relative to max(generate, train)",
                 share(file, "step_over_bound"), "benchmarks/speed/overlap.py",
                 "a step", seconds(file, "one_step_off", "step_s"))]  # fmt: skip
    if what.startswith("0.6B on 1"):
        found += [
            Row(f"{what}, time-shared on both: a step", seconds(file, "colocated", "step_s"), "benchmarks/speed/overlap.py",
                "predicted from the run one step off", seconds(file, "predicted_colocated_s")),
            Row(f"{what}, the same one step off: a step", seconds(file, "one_step_off", "step_s"), "benchmarks/speed/overlap.py",
                "fitted to its own nodes", seconds(file, "fitted_one_step_off_s")),
        ]  # fmt: skip
    return found


ON_GPUS = [
    *PEERS,
    Row("SmolLM2-135M, 1024 tokens, one step off: a step", seconds("peer_job_h200.json", "one_step_off", "step_s", form="{:.1f} s"),
        "benchmarks/peers/peer_job.py", "estimated with nothing measured",
        seconds("peer_job_h200.json", "one_step_off", "predicted_s", form="{:.1f} s")),
    Row("SmolLM2-135M, 1024 tokens, time-shared on both: a step", seconds("peer_job_h200.json", "colocated", "step_s", form="{:.1f} s"),
        "benchmarks/peers/peer_job.py mode=colocated costs=…", "predicted from the run one step off",
        seconds("peer_job_h200.json", "colocated", "predicted_s", form="{:.1f} s")),
    Row("log-probs and their gradient, 8192 rows of 151,936 logits",
        ms("kernels_h200.json", "log_probs", "rlgraph", "seconds"), "benchmarks/speed/kernel_times.py", "Liger, logits as float32",
        ms("kernels_h200.json", "log_probs", "liger, float32", "seconds")),
    Row("the same: memory", gigabytes("kernels_h200.json", "log_probs", "rlgraph", "bytes"), "benchmarks/speed/kernel_times.py",
        "Liger, logits as float32", gigabytes("kernels_h200.json", "log_probs", "liger, float32", "bytes")),
    Row("the same: worst error in nats", share("kernels_h200.json", "log_probs", "rlgraph", "worst_error_nats", form="{:.6f}"),
        "benchmarks/speed/kernel_times.py",
        "Liger, logits as bfloat16", share("kernels_h200.json", "log_probs", "liger", "worst_error_nats", form="{:.6f}")),
    Row("RMS norm and its gradients, 8192 × 2560",
        ms("kernels_h200.json", "rms_norm, hidden of 4B", "rlgraph (torch's kernel)", "seconds", form="{:.2f} ms"),
        "benchmarks/speed/kernel_times.py", "Liger",
        ms("kernels_h200.json", "rms_norm, hidden of 4B", "liger", "seconds", form="{:.2f} ms")),
    generation("SmolLM2", "generation_engines_h200.json", "generation_h200.json", "one vLLM with log-probs, on another day"),
    Row("the same", seconds("generation_engines_h200.json", "seconds", "rlgraph, 1 engine", form="{:.1f} s"),
        "benchmarks/speed/generation.py smollm2 --engines 1 4", "four engines on the GPU",
        seconds("generation_engines_h200.json", "seconds", "rlgraph, 4 engines", form="{:.1f} s")),
    generation("4B", "generation_4b_h200.json", "generation_4b_h200.json", "one vLLM with log-probs"),
    *(decode_step(*each) for each in (("SmolLM2", 1024), ("SmolLM2", 256), ("0.6B", 256), ("1.7B", 64), ("1.7B", 256), ("4B", 256))),
    Row("0.6B time-shared, one GPU: from the command to the end of the first step", seconds("start_h200.json", "median_s", form="{:.0f} s"),
        "benchmarks/speed/start.py --shape 0.6B"),
    *(row for shape in ("8B", "0.6B") for row in weights(shape)),
    *(
        Row(f"{shape} into an engine over two GPUs, one of them the trainer's: decoding stopped",
            ms("weights_two_gpus_h200.json", "shapes", shape, "median", "decode_gap_s"), "benchmarks/speed/weights.py --tensor-parallel 2")
        for shape in ("8B", "0.6B")
    ),
    Row("8B from 2 sharded ranks to 2 engines", Figure("sharded_weights_h200.json", ("shapes", "8B", "2 to 2", "median", "gb_per_s"),
        "{:.0f} GB/s"), "benchmarks/speed/sharded_weights.py", "from 1 to 1",
        Figure("sharded_weights_h200.json", ("shapes", "8B", "1 to 1", "median", "gb_per_s"), "{:.0f} GB/s")),
    flash("4B:1:compiled", "4B on one GPU, compiled"),
    flash("1.7B:1:compiled", "1.7B on one GPU, compiled"),
    training("4B:1", "4B on one GPU, eager"),
    *overlap("overlap_h200.json", "0.6B on 1 + 1 GPUs"),
    *overlap("overlap_4b_four_gpus_h200.json", "4B on 2 + 2 GPUs"),
    Row("steps of {count} configurations of 1.7B and 4B, fitted to profiles taken before the runs: median error",
        percent("prediction_h200.json", "fit_median_error"), "benchmarks/prediction/prediction_gpu.py --again",
        "worst", percent("prediction_h200.json", "fit_worst_error"), {"count": count("prediction_h200.json", "configurations_measured")}),
    *learned("SmolLM2 learns to add, one step off", "one_step_off_h200.jsonl", "recipes/one_step_off.py"),
    *rollouts("rollout_h200.json", "SmolLM2"),
    *TURNS_ON_H200,
    *recomputed("training_recompute_h200.json", "1.7B"),
    Row("8B into a trainer on one GPU", seconds("loading_h200.json", "runs", "8B:1", "seconds", form="{:.1f} s"),
        "benchmarks/speed/loading.py 8B:1",
        "reading its files twice", seconds("loading_h200.json", "runs", "8B:1", "read_twice_s", form="{:.1f} s")),
]  # fmt: skip
