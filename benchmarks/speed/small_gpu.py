"""What users with one GPU need: memory and speed of adapters, time-sharing, fp8 weights, drafted tokens and moments in host memory.

    python benchmarks/speed/small_gpu.py PART … [--json PATH] [--limit 200]
    python benchmarks/speed/small_gpu.py lora_memory lora_publish colocated fp8 speculative moments
    python benchmarks/speed/small_gpu.py PART … --smoke        # tiny shapes, on a CPU

Each part is a process of its own, which prints as it goes. A part that fails prints its traceback, and the others run. The file is written
after each part, beside the parts that it holds of earlier runs on such a machine. Models are the shapes of `shapes.py` with random weights.

* `lora_memory`: the peak of a trainer of an adapter of rank 32, beside the bytes that a plan counts.
* `lora_publish`: an adapter staged by the trainer, received, merged into an engine's live weights (`lora_stage`: without an engine);
  vLLM's own LoRA beside it (`vllm_lora`).
* `colocated`, `colocated_8b`: a job on one GPU in turns, 1.7B in full and 8B by an adapter: seconds of sleeping, waking and a step; the
  most memory of the GPU that all processes had. `colocated_stay`: 1.7B whose moments never leave the GPU. `colocated_halves`,
  `colocated_8b_halves`: a rollout and an update of the same size, each with the GPU to itself.
* `fp8`, `fp8_8b`, `fp8_kv` (keys and values too): an engine with fp8 weights beside one in bfloat16: tokens a second,
  a swap of weights, and how far its log-probs are.
* `fp8_learning`: SmolLM2 learns to add with fp8 rollouts, with and without truncated importance sampling, beside bfloat16; three seeds.
* `speculative`: rollouts with guessed tokens, beside those without, on responses that end early and late, by a model that never repeats
  itself; `speculative_best`: by one that always does.
* `moments`: an update of 4B with AdamW's moments in host memory, beside one with them on the GPU; `moments_of_8b`: of 8B, in host memory;
  `moments_8bit`: in 8 bits, beside 32; `moments_learning`: how a small model learns with either.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write

PARTS = {  # by the module that has a function of that name
    "lora_memory": "small_gpu_training",
    "moments": "small_gpu_training",
    "moments_of_8b": "small_gpu_training",
    "moments_8bit": "small_gpu_training",
    "moments_learning": "small_gpu_training",
    "lora_publish": "small_gpu_adapters",
    "lora_stage": "small_gpu_adapters",
    "vllm_lora": "small_gpu_adapters",
    "colocated": "small_gpu_jobs",
    "colocated_stay": "small_gpu_jobs",
    "colocated_halves": "small_gpu_jobs",
    "colocated_8b": "small_gpu_jobs",
    "colocated_8b_halves": "small_gpu_jobs",
    "fp8_learning": "small_gpu_jobs",
    "fp8": "small_gpu_engines",
    "fp8_8b": "small_gpu_engines",
    "fp8_kv": "small_gpu_engines",
    "speculative": "small_gpu_engines",
    "speculative_best": "small_gpu_engines",
}


def say(text: str) -> None:
    """Print a line with the seconds since this process began."""
    print(f"  [{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


BEGAN = time.monotonic()
OUT = "RLGRAPH_SMALL_GPU_OUT"  # the file of a part's process


def keep(found: Mapping[str, Any]) -> None:
    """Write what a part has found so far: the file of results gets it if the part is killed at its limit."""
    if OUT in os.environ:
        Path(os.environ[OUT]).write_text(json.dumps({**found, "unfinished": True}, indent=1) + "\n")


def child(part: str, out: Path, smoke: bool) -> None:
    """Run one part in this process; the file gets what it returns."""
    os.environ[OUT] = str(out)
    try:
        found = getattr(import_module(f"benchmarks.speed.{PARTS[part]}"), part)(smoke)
    except BaseException:  # noqa: BLE001 (whatever it is, its traceback is printed)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # engines and libraries that take their time to end are not waited for


def run(part: str, limit_s: float, smoke: bool) -> dict[str, Any] | None:
    """Run a part in a process of its own; None if it failed and kept nothing."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, part, "--child", str(out), *(["--smoke"] if smoke else [])]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = f"killed after {limit_s:.0f} s"
        print(f"{part}: {'done' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - began:.0f} s", flush=True)
        return json.loads(out.read_text()) if code == 0 or (isinstance(code, str) and out.exists()) else None


def main() -> None:
    parser = command_line(__doc__, smoke="tiny shapes, on a CPU")
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a part, at most")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.parts[0], given.child, given.smoke)
    from benchmarks.lib.machine import machine

    here = machine()
    earlier = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    parts: dict[str, Any] = earlier.get("parts", {}) if earlier.get("machine") == here else {}
    failed = []
    for part in given.parts:
        print(f"{part}:", flush=True)
        found = run(part, given.limit, given.smoke)
        if found is None or found.get("unfinished"):
            failed.append(part)
        if found is None:
            continue
        parts[part] = found
        write(given.json, {"script": "benchmarks/speed/small_gpu.py", "machine": here, "parts": parts})
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
