"""SGLang beside vLLM as engines of rlgraph, one after the other in one run: tokens a second, the gap of a swap, conversations with tools.

    python benchmarks/speed/second_engine.py MODEL … [--sequences 256] [--tokens 512] [--turns 4] [--json PATH] [--limit 200]
        [--engines vllm sglang] [--vllm-python PYTHON] [--sglang-python PYTHON]
    python benchmarks/speed/second_engine.py smollm2 0.6B 4B --json second_engine.json    # on a GPU
    python benchmarks/speed/second_engine.py toy --smoke                                  # its first seconds, on a CPU

MODEL is a folder, a name that `rg.model_folder` knows, or a shape of `shapes.py`, whose weights are random. The two engines exclude each
other's versions, so each runs in the interpreter of its own environment, alone on the device. Each part prints as it ends and is written at
once; one that fails prints its traceback, and the others run.

* **throughput**: prompts of 64 tokens, responses of one length, with their log-probs; the median of three repeats after one that warms up.
* **swap**: new weights while all responses are under way: the seconds of `load_weights` and of the step after it, less those of the step
  before. `recompute` reads every response again in that step, `keep` does not.
* **conversations**: each turn's prompt is all that was said, and a tool's 32 tokens after each answer. What was said is in vLLM's prefix
  cache in blocks, and in SGLang's radix tree to the token. The same turns with prompts that share nothing are timed beside them.
  `tool_rollouts.py --engine` runs conversations with tools that take a while, as a job does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write
from benchmarks.lib.shapes import SHAPES, random_model

ENGINES = ("vllm", "sglang")
PROMPT, TOLD = 64, 32  # tokens of a first prompt, and of what a tool says
REPEATS = 3
MEMORY = 0.6  # of a GPU; new weights lie beside
BEGAN = time.perf_counter()


def say(text: str) -> None:
    """Print a line with the seconds since this process began."""
    print(f"  [{time.perf_counter() - BEGAN:5.1f} s] {text}", flush=True)


def folder_of(model: str) -> str:
    """Find the folder of a model, which is made if it is a shape."""
    import rlgraph as rg

    if model in SHAPES:
        return random_model(model, ".models")
    return model if Path(model).is_dir() else str(rg.model_folder(model))


def engine_of(name: str, folder: str, context: int, sequences: int) -> Any:
    import torch

    dtype, memory = ("bfloat16", MEMORY) if torch.cuda.is_available() else ("float32", None)
    if name == "vllm":
        from rlgraph.engines.vllm.engine import VllmEngine

        return VllmEngine(folder, max_model_len=context, dtype=dtype, max_sequences=sequences, memory=memory)
    from rlgraph.engines.sglang.engine import SglangEngine

    return SglangEngine(folder, max_context=context, dtype=dtype, max_sequences=sequences, memory=memory)


def prompts(count: int, salt: int) -> list[list[int]]:
    return [[(7 * i + 3 * j + 11 * salt) % 200 + 5 for j in range(PROMPT)] for i in range(count)]


def throughput(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    from rlgraph.values.sampling import Sampling

    found = []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        sampling = Sampling(max_tokens=given.tokens, ignore_eos=True)
        responses = engine.generate(prompts(given.sequences, repeat), sampling, list(range(given.sequences)))
        found.append(sum(len(response.tokens) for response in responses) / (time.perf_counter() - start))
        say(f"{found[-1]:,.0f} tokens/s{'' if repeat else ' (warming up)'}")
    return {"tokens_a_second": statistics.median(found[1:]), "least": min(found[1:]), "most": max(found[1:])}


def swap(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    import torch
    from safetensors.torch import load_file

    from rlgraph.engines.api import Request
    from rlgraph.values.sampling import Sampling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights: dict[str, Any] = {}
    for file in sorted(Path(given.folder).glob("*.safetensors")):
        weights |= {name: tensor.to(device, dtype) for name, tensor in load_file(file).items()}
    start = time.perf_counter()
    engine.load_weights(weights)
    found = {"first_s": time.perf_counter() - start}  # which records the copies
    for running in ("recompute", "keep"):
        sampling = Sampling(max_tokens=given.tokens, ignore_eos=True)
        for row, prompt in enumerate(prompts(given.sequences, REPEATS + 1)):
            engine.submit(Request(f"{running} {row}", prompt, sampling, row))
        for _ in range(given.tokens // 2):
            engine.step()
        start = time.perf_counter()
        engine.step()
        usual = time.perf_counter() - start
        start = time.perf_counter()
        engine.load_weights(weights, running=running)
        engine.step()
        if device == "cuda":
            torch.cuda.synchronize()
        found[f"gap_s_{running}"] = time.perf_counter() - start - usual
        found[f"step_s_{running}"] = usual
        engine.abort(list(engine.count_tokens()))
        say(f"swap, {running}: {found[f'gap_s_{running}'] * 1e3:,.1f} ms more than a step of {usual * 1e3:.1f} ms")
    return found


def conversations(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    from rlgraph.values.sampling import Sampling

    most = max(1, given.tokens // given.turns - TOLD)
    sampling = Sampling(max_tokens=most, ignore_eos=True)
    seconds = {"shared": 0.0, "apart": 0.0}
    said = prompts(given.sequences, REPEATS + 2)
    for turn in range(given.turns):
        # Of the same lengths, with a first token that no other prompt has in this turn: nothing is in a cache.
        alone = [[205 + turn, *tokens[1:]] for tokens in said]
        answers = []
        for what, asked in (("apart", alone), ("shared", said)):
            start = time.perf_counter()
            answers = engine.generate(asked, sampling, list(range(given.sequences)))
            seconds[what] += time.perf_counter() - start
        say(
            f"turn {turn + 1}, prompts of {len(said[0])} tokens: {seconds['shared']:.2f} s so far, {seconds['apart']:.2f} s without a cache"
        )
        told = [(13 * turn + j) % 200 + 5 for j in range(TOLD)]
        said = [[*tokens, *answer.tokens, *told] for tokens, answer in zip(said, answers, strict=True)]
    count = given.sequences * given.turns * most
    return {"tokens_a_second": count / seconds["shared"], "tokens_a_second_apart": count / seconds["apart"]}


PARTS: dict[str, Callable[[Any, argparse.Namespace], dict[str, float]]] = {
    "throughput": throughput,
    "conversations": conversations,
    "swap": swap,
}


def one(name: str, given: argparse.Namespace) -> bool:
    """Measure one engine on one model in this process; the file gets each part as it ends. Return whether all went well."""
    import torch

    from rlgraph.engines.precision import leave_out_broken_amx

    leave_out_broken_amx()
    start = time.perf_counter()
    engine = engine_of(name, given.folder, PROMPT + given.tokens + given.turns * TOLD, given.sequences)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start, "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    say(f"started in {found['start_s']:.1f} s")
    well = True
    for part, measure in PARTS.items():
        try:
            found[part] = measure(engine, given)
        except Exception:  # noqa: BLE001 (whatever it is, its traceback is printed)
            traceback.print_exc()
            well = False
            if engine.count_requests():
                engine.abort(list(engine.count_tokens()))
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return well


def apart(name: str, model: str, folder: str, given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Measure one engine on one model in a process of its own; return what it found until it ended, and whether all went well."""
    out = Path(folder) / f"second_engine_{name}.json"
    out.unlink(missing_ok=True)
    python = given.vllm_python if name == "vllm" else given.sglang_python
    options = ["--sequences", given.sequences, "--tokens", given.tokens, "--turns", given.turns]
    command = [python, __file__, model, *map(str, options), "--alone", name, "--out", str(out), "--folder", folder]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(given.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        code = process.wait()
        print(f"{model}, {name}: killed after {given.limit:.0f} s", flush=True)
    found = json.loads(out.read_text()) if out.exists() else {}
    out.unlink(missing_ok=True)
    return found, code == 0


def arguments() -> argparse.Namespace:
    parser = command_line(__doc__, smoke="few and short responses")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of an engine on a model, at most")
    parser.add_argument("--alone", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.smoke:
        given.sequences, given.tokens, given.turns = 4, 72, 2
    if given.alone:
        well = one(given.alone, given)
        sys.stdout.flush()
        os._exit(0 if well else 1)  # engines and libraries that take their time to end are not waited for
    settings = {"sequences": given.sequences, "tokens": given.tokens, "turns": given.turns}
    models: dict[str, Any] = {}
    failed = []
    for model in given.models:
        folder, name_of_model = folder_of(model), Path(model).name
        for name in given.engines:
            print(f"{name_of_model}, {name}:", flush=True)
            found, well = apart(name, model, folder, given)
            models.setdefault(name_of_model, {})[name] = found
            if not well:
                failed.append(f"{name_of_model} {name}")
            if given.json:
                written = {"script": "benchmarks/speed/second_engine.py", "settings": settings, "models": models}
                write(given.json, written)
    print(json.dumps(models, indent=1))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
