"""The rows of two H200s: ranks that share a pass or experts, the largest models, Megatron-Core beside FSDP2, weights to an engine."""

from benchmarks.lib.figures import Figure, gigabytes, ms, percent, seconds
from benchmarks.report.h100_rows import update
from benchmarks.report.learning_rows import learned
from benchmarks.report.table import Row

MEGATRON = {"4B": "parallel_4k_h200.json", "8B": "parallel_8b_h200.json"}
NOW = "parallel_compiled_h200.json"
SIZE = "--sequences 8 --length 4096"
EIGHT, PARTLY = "8B:dp2:compiled:eager", "8B:dp2:compiled:selective"
KEPT, PART, MANY = (f"parallel_8b_{how}_h200.json" for how in ("kept", "one_pass", "selective"))


def by_megatron(model: str, way: str, what: str) -> Row:
    """An update by Megatron-Core, beside FSDP2 in the same run."""
    file, spec = MEGATRON[model], f"{model}:{way}"
    return update(file, f"{spec}:megatron", f"{model}, Megatron-Core, {what}, recomputed", f"{spec} {spec}:megatron {SIZE}", "FSDP2",
                  seconds(file, "runs", spec, "step_s"))  # fmt: skip


def shared(spec: str, what: str) -> Row:
    return update(NOW, spec, what, f"4B:dp1 {spec} {SIZE}", "predicted from one GPU",
                  seconds(NOW, "runs", spec, "predicted_from_one_rank_s"))  # fmt: skip


def large(file: str, model: str, options: str = "", passes: str = "") -> list[Row]:
    """What the largest models take to load and to update, beside what a plan counts."""
    script = f"benchmarks/speed/large.py {model}{options}"
    return [
        Row(f"{model}, two ranks that each load their part: loading time", seconds(file, "load", "s", form="{:.1f} s"), script,
            "bytes of its files", gigabytes(file, "write", "bytes")),
        Row(f"{model}: peak of a GPU while loading", gigabytes(file, "load", "device_peak_bytes"), script, "in the plan",
            gigabytes(file, "load", "device_counted_bytes")),
        Row(f"{model}: an update of 8 sequences of 4,096 tokens{passes}, recomputed, moments of 16 bits on the host",
            seconds(file, "update", "step_s", form="{:.1f} s"), script, "estimated with nothing measured",
            seconds(file, "plan", "step_s", form="{:.1f} s")),
        Row(f"{model}: peak of a GPU in it", gigabytes(file, "update", "peak_bytes"), script, "in the plan",
            gigabytes(file, "plan", "peak_bytes")),
        Row(f"{model}: memory of the host in it", gigabytes(file, "host_bytes"), script, "in the plan",
            gigabytes(file, "plan", "host_bytes")),
    ]  # fmt: skip


def wire(trainer: str, what: str) -> Row:
    file = "sharded_weights_trainers_h200.json"
    return Row(f"8B weights from {what} to an engine on the other GPU that decodes",
               Figure(file, ("shapes", "8B", trainer, "median", "gb_per_s"), "{:.0f} GB/s"),
               "benchmarks/speed/sharded_weights.py 8B --ranks 1 --engines 1 --trainers fsdp megatron", "plain copy",
               Figure(file, ("raw_copy_gb_per_s",), "{:.0f} GB/s"))  # fmt: skip


ON_TWO_H200S = [
    Row("training 8B on two GPUs, compiled, activations kept, packed 4k sequences: MFU of 989 TFLOP/s",
        percent(KEPT, "runs", EIGHT, "mfu", form="{:.0f} %"), f"benchmarks/speed/parallel.py {EIGHT} {SIZE} --pass-tokens 8192",
        '`recompute="selective"` in one pass', percent(PART, "runs", PARTLY, "mfu", form="{:.0f} %")),
    Row("the same: an update", seconds(KEPT, "runs", EIGHT, "step_s"), f"benchmarks/speed/parallel.py {EIGHT} {SIZE} --pass-tokens 8192",
        '`recompute="selective"` in one pass', seconds(PART, "runs", PARTLY, "step_s")),
    Row('the same with `recompute="selective"` and 32 sequences, in micro-batches of 16,384 tokens: an update',
        seconds(MANY, "runs", PARTLY, "step_s"), f"benchmarks/speed/parallel.py {PARTLY} --sequences 32 --length 4096 --pass-tokens 16384",
        "MFU", percent(MANY, "runs", PARTLY, "mfu", form="{:.0f} %")),
    *(by_megatron(model, way, what) for model in MEGATRON for way, what in (("dp2", "dp 2"), ("tp2", "tp 2"))),
    shared("4B:dp2", "4B, dp 2, recomputed"),
    shared("4B:tp2", "4B, tp 2, recomputed"),
    update(NOW, "4B:tp2:compiled", "4B, tp 2, recomputed, compiled", f"4B:tp2 4B:tp2:compiled {SIZE}", "not compiled",
           seconds(NOW, "runs", "4B:tp2", "step_s")),
    *large("large_32b_h200.json", "32B"),
    *large("large_30b_a3b_h200.json", "30B-A3B", " --pass-tokens 16384", " in micro-batches of 16,384"),
    *(wire(f"1 to 1{trainer}", what) for trainer, what in ((", fsdp", "a trainer of FSDP2"), (", megatron", "one of Megatron-Core"))),
    Row("the same by Megatron-Core: decoding stopped", ms("sharded_weights_trainers_h200.json", "shapes", "8B", "1 to 1, megatron",
        "median", "decode_gap_s"), "benchmarks/speed/sharded_weights.py 8B --ranks 1 --engines 1 --trainers fsdp megatron", "by FSDP2",
        ms("sharded_weights_trainers_h200.json", "shapes", "8B", "1 to 1, fsdp", "median", "decode_gap_s")),
    *learned("SmolLM2 learns to add, one step off, Megatron-Core trains and vLLM generates", "one_step_off_megatron_h200.jsonl",
             "recipes/one_step_off.py trainer=megatron"),
]  # fmt: skip
