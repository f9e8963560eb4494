"""The rows of measurements on H100s: ranks that share a pass or experts, shared prompts, and routes that are replayed."""

from benchmarks.lib.figures import Figure, count, ms, percent, seconds, share
from benchmarks.report.table import Row

SHARED, ROUTES = "shared_prompts_h100.json", "router_replay_h100.json"
STEPS, RECORDED = "decode_steps_4b_h100.json", ("ways", "recorded")
NORMS = "norms, rotations, activations"  # a kind of kernels


def update(file: str, spec: str, what: str, command: str, beside: str, other: Figure) -> Row:
    """The seconds of an update, compared with another figure."""
    words = {"sequences": count(file, "sequences"), "length": count(file, "length")}
    return Row(f"{what}, {{sequences}} sequences of {{length}} tokens: an update", seconds(file, "runs", spec, "step_s"),
               f"benchmarks/speed/parallel.py {command}", beside, other, words)  # fmt: skip


def sixteen(spec: str, what: str) -> Row:
    file = "parallel_16k_h100.json"
    return update(file, spec, what, f"1.7B:dp1 {spec} --sequences 4 --length 16384", "predicted from one GPU",
                  seconds(file, "runs", spec, "predicted_from_one_rank_s"))  # fmt: skip


def four(spec: str, what: str, other: str, beside: str) -> Row:
    file = "parallel_4k_h100.json"
    return update(file, spec, what, f"{spec} {other} --sequences 8 --length 4096", beside, seconds(file, "runs", other, "step_s"))


def now(spec: str, what: str, beside: str, *other: str) -> Row:
    """An update of 4B by ranks that have one thread each, as workers do."""
    file = "parallel_4b_h100.json"
    return update(file, spec, what, f"4B:dp1 {spec} --sequences 8 --length 4096", beside, seconds(file, "runs", spec, *other))


def experts(way: str) -> Row:
    """An update of a mixture with micro-batches of 16,384 tokens, compared with 4,096."""
    spec, options = f"30B-A3B-8:{way}", "--sequences 8 --length 4096 --pass-tokens 16384"
    what = f"30B-A3B with 8 layers, {way[:2]} 2, recomputed, micro-batches of 16,384 tokens"
    return update("experts_16k_h100.json", spec, what, f"{spec} {options}", "micro-batches of 4,096",
                  seconds("experts_h100.json", "runs", spec, "step_s"))  # fmt: skip


def launched_again(what: str, field: str) -> list[Row]:
    """The row of a job in turns that a program launches again, with its engine and without."""
    kept, warm = (seconds("launches_h100.json", "medians", f"{kind}, later", field, form="{:.1f} s") for kind in ("engines kept", "warm"))
    return [Row(f"0.6B in turns, launched again inside of `rg.runs.warm(engines=True)`: {what}", kept,
                "benchmarks/speed/launches.py --shape 0.6B",
                "`rg.runs.warm()`", warm)]  # fmt: skip


def replayed(what: str, field: str) -> Row:
    return Row(f"mixture of 128 experts in the shape of 30B-A3B with 4 layers, `router_replay=True`: {what} of log-probs in a bfloat16 "
               "trainer from bfloat16 vLLM's, in nats", share(ROUTES, "bfloat16", "replayed", field, form="{:.4f}"),
               "benchmarks/speed/router_replay.py --layers 4", "own routers",
               share(ROUTES, "bfloat16", "own", field, form="{:.4f}"))  # fmt: skip


def shared(what: str, field: str) -> Row:
    return Row(f"{what} of 0.6B, 8 prompts of 1,024 tokens with 16 responses of 256 each, prompts shared",
               seconds(SHARED, "0.6B", field, "shared", "seconds"), "benchmarks/speed/shared_prompts.py --shapes 0.6B", "own prompts",
               seconds(SHARED, "0.6B", field, "own", "seconds"))  # fmt: skip


def beside_vllm(model: str, what: str, field: tuple[str, ...], form: str, scale: float = 1.0) -> Row:
    """The same on both engines, one after the other on one GPU."""
    sglang, vllm = (Figure("second_engine_h100.json", ("models", model, engine, *field), form, scale) for engine in ("sglang", "vllm"))
    return Row(f"{model}, SGLang: {what}", sglang, f"benchmarks/speed/second_engine.py {model}", "vLLM", vllm)


SECOND_ENGINE = [
    row
    for model in ("0.6B", "4B")
    for row in (
        beside_vllm(model, "256 responses of 512 tokens with log-probs, tokens/s", ("throughput", "tokens_a_second"), "{:,.0f}"),
        beside_vllm(model, "the same in conversations of 4 turns", ("conversations", "tokens_a_second"), "{:,.0f}"),
        beside_vllm(model, "a swap while 256 responses decode, KV cache kept", ("swap", "gap_s_keep"), "{:.1f} ms", 1e3),
        beside_vllm(model, "a swap while 256 responses decode, their KV cache recomputed", ("swap", "gap_s_recompute"), "{:.0f} ms", 1e3),
    )
]

ON_H100S = [
    *SECOND_ENGINE,
    Row("training 1.7B on one GPU, compiled, packed 4k sequences: MFU of 989 TFLOP/s",
        percent("training_h100.json", "runs", "1.7B:1:compiled", "mfu", form="{:.0f} %"), "benchmarks/speed/training.py 1.7B:1:compiled",
        "of a large matrix product", percent("training_h100.json", "runs", "1.7B:1:compiled", "of_matmul", form="{:.0f} %")),
    Row("4B, 256 responses, at 512 of 1,024 tokens: a decode step", ms(STEPS, *RECORDED, "step_s"), "benchmarks/speed/decode_steps.py 4B",
        "attention in it", ms(STEPS, *RECORDED, "kernel_s", "attention")),
    Row("the same: products in it", ms(STEPS, *RECORDED, "kernel_s", "products"), "benchmarks/speed/decode_steps.py 4B",
        "sampling and log-probs", ms(STEPS, *RECORDED, "kernel_s", "sampling", form="{:.2f} ms")),
    Row("the same, compiled by vLLM: a decode step", ms(STEPS, "ways", "compiled", "step_s"),
        "benchmarks/speed/decode_steps.py 4B --ways compiled", "norms, rotations and activations in it",
        ms(STEPS, "ways", "compiled", "kernel_s", NORMS, form="{:.2f} ms")),
    Row("the same, pages of 128 tokens: a decode step", ms(STEPS, "ways", "pages", "step_s"),
        "benchmarks/speed/decode_steps.py 4B --ways pages",
        "attention in it", ms(STEPS, "ways", "pages", "kernel_s", "attention")),
    *launched_again("until all workers are ready", "ready_s"),
    *launched_again("to the end of the first step", "first_step_s"),
    shared("an update", "update"),
    shared("log-probs", "scores"),
    sixteen("1.7B:dp2", "1.7B, dp 2, recomputed"),
    sixteen("1.7B:cp2", "1.7B, cp 2, recomputed"),
    sixteen("1.7B:tp2", "1.7B, tp 2, recomputed"),
    update("parallel_32k_h100.json", "8B:cp2:offload", "8B, cp 2, recomputed, moments on the host", "8B:cp2:offload",
           "estimated with nothing measured", seconds("parallel_32k_h100.json", "runs", "8B:cp2:offload", "predicted", "step_s")),
    four("4B:dp2:megatron", "4B, Megatron-Core, dp 2, recomputed", "4B:dp2", "FSDP2, dp 2"),
    four("4B:tp2:megatron", "4B, Megatron-Core, tp 2, recomputed", "4B:tp2", "FSDP2, tp 2"),
    now("4B:dp2", "4B, dp 2, recomputed", "predicted from one GPU", "predicted_from_one_rank_s"),
    now("4B:dp2:compiled", "4B, dp 2, recomputed, compiled", "estimated with nothing measured", "predicted", "step_s"),
    *(experts(way) for way in ("ep2", "dp2")),
    replayed("mean distance", "mean"),
    replayed("99th percentile of the distance", "p99"),
]  # fmt: skip
