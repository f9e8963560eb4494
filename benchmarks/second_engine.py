"""SGLang beside vLLM as engines of rlgraph, one after the other in one run: tokens a second, the gap of a swap, conversations with tools.

    python benchmarks/second_engine.py FOLDER [--sequences 256] [--tokens 512] [--turns 4] [--json PATH]
        [--vllm-python PYTHON] [--sglang-python PYTHON]
    python benchmarks/second_engine.py FOLDER --smoke     # its first seconds, on a CPU

The two exclude each other's versions, so each runs in the interpreter of its own environment, alone on the device.

* **tokens a second**: prompts of 64 tokens, responses of one length; the median of three repeats after one that warms up.
* **swap**: new weights while all responses are under way: the seconds of `load_weights` and of the step after it, less those of the step
  before. `recompute` reads every response again in that step, `keep` does not.
* **conversations**: each turn's prompt is all that was said, and a tool's 32 tokens after each answer. What was said is in vLLM's prefix
  cache in blocks, and in SGLang's radix tree to the token. The same turns with prompts that share nothing are timed beside them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINES = ("vllm", "sglang")
PROMPT, TOLD = 64, 32  # tokens of a first prompt, and of what a tool says
REPEATS = 3


def engine_of(name: str, folder: str, context: int, sequences: int) -> Any:
    import torch

    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"
    if name == "vllm":
        from rlgraph.engines.vllm.engine import VllmEngine

        return VllmEngine(folder, max_model_len=context, dtype=dtype, max_sequences=sequences)
    from rlgraph.engines.sglang.engine import SglangEngine

    return SglangEngine(folder, max_context=context, dtype=dtype, max_sequences=sequences)


def prompts(count: int, salt: int) -> list[list[int]]:
    return [[(7 * i + 3 * j + 11 * salt) % 200 + 5 for j in range(PROMPT)] for i in range(count)]


def throughput(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    from rlgraph.engines.api import Sampling

    found = []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        sampling = Sampling(max_tokens=given.tokens, ignore_eos=True)
        responses = engine.generate(prompts(given.sequences, repeat), sampling, list(range(given.sequences)))
        found.append(sum(len(response.tokens) for response in responses) / (time.perf_counter() - start))
    return {"tokens_a_second": statistics.median(found[1:]), "least": min(found[1:]), "most": max(found[1:])}


def swaps(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    import torch
    from safetensors.torch import load_file

    from rlgraph.engines.api import Request, Sampling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = {
        name: tensor.to(device, dtype)
        for file in sorted(Path(given.folder).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    engine.load_weights(weights)  # the first one records the copies
    found: dict[str, float] = {}
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
        found[f"gap_s_{running}"] = time.perf_counter() - start - usual
        engine.abort(list(engine.written()))
    return found


def conversations(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    from rlgraph.engines.api import Sampling

    most = max(1, given.tokens // given.turns - TOLD)
    sampling = Sampling(max_tokens=most, ignore_eos=True)
    seconds = {"shared": 0.0, "apart": 0.0}
    said = prompts(given.sequences, REPEATS + 2)
    for turn in range(given.turns):
        # Of the same lengths, with a first token that no other prompt has in this turn: nothing is in a cache.
        apart = [[5 + (turn + 1) % 200, *tokens[1:]] for tokens in said]
        start = time.perf_counter()
        engine.generate(apart, sampling, list(range(given.sequences)))
        seconds["apart"] += time.perf_counter() - start
        start = time.perf_counter()
        answers = engine.generate(said, sampling, list(range(given.sequences)))
        seconds["shared"] += time.perf_counter() - start
        told = [(13 * turn + j) % 200 + 5 for j in range(TOLD)]
        said = [[*tokens, *answer.tokens, *told] for tokens, answer in zip(said, answers, strict=True)]
    count = given.sequences * given.turns * most
    return {"tokens_a_second": count / seconds["shared"], "tokens_a_second_apart": count / seconds["apart"]}


def one(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one engine in this process."""
    import torch

    from rlgraph.engines.amx import leave_out_broken_amx

    leave_out_broken_amx()
    start = time.perf_counter()
    engine = engine_of(name, given.folder, PROMPT + given.tokens + given.turns * TOLD, given.sequences)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start, "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found |= {"throughput": throughput(engine, given), "swap": swaps(engine, given), "conversations": conversations(engine, given)}
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--smoke", action="store_true", help="few and short responses")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.sequences, given.tokens, given.turns = 4, 72, 2
    if given.alone:
        given.out.write_text(json.dumps(one(given.alone, given)))
        return
    found: dict[str, Any] = {}
    for name in given.engines:
        out = Path(f"second_engine_{name}.json")
        python = given.vllm_python if name == "vllm" else given.sglang_python
        subprocess.run([python, __file__, *sys.argv[1:], "--alone", name, "--out", str(out)], check=True)
        found[name] = json.loads(out.read_text())
        out.unlink()
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
