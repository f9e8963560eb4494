"""Generation by rlgraph's engines against `LLM.generate` with vLLM's own defaults, on one GPU, one after the other in one run.

    python benchmarks/speed/generation.py FOLDER [--sequences 1024] [--tokens 1024] [--engines 1 4] [--json PATH]
    python benchmarks/speed/generation.py tiny --smoke          # its first seconds, on a CPU

vLLM compiles and records CUDA graphs as it does by itself; only the largest graph is set to the number of sequences, since its own limit
is 512, and the prefix cache is off, since repeats have the same prompts. `vllm` is timed without log-probs and with them; rlgraph
always returns them, so that `with_log_probs` is what it is compared with. Every process has the GPU to itself; with several engines
each has its share of the sequences, and the time is until the last is done.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured

REPEATS = 2  # after one of a few tokens that warms up
WARM_UP_TOKENS = 32
LONGEST_S = 420.0


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 200 + 5 for j in range(22)] for i in range(count)]


def ours(folder: str, sequences: int, tokens: int, engines: int, index: int, barrier: Any, out: Any) -> None:
    """Time one of `engines` engines that share the GPU; all begin a repeat together."""
    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    own = -(-sequences // engines)
    engine = VllmEngine(folder, max_model_len=max(64, 2 * tokens), max_sequences=own, engines=engines)
    for repeat in range(REPEATS + 1):
        most = tokens if repeat else min(tokens, WARM_UP_TOKENS)
        sampling = Sampling(max_tokens=most, ignore_eos=True)
        barrier.wait(LONGEST_S)
        start = time.monotonic()
        responses = engine.generate(prompts(sequences)[index::engines], sampling, list(range(index, sequences, engines)))
        assert all(len(response.tokens) == most for response in responses), repeat
        out.put((repeat, start, time.monotonic()))


def plain(folder: str, sequences: int, tokens: int, log_probs: bool, barrier: Any, out: Any) -> None:
    """Time `LLM.generate` with vLLM's defaults."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # its kernels are compiled when they are first used, which needs a compiler
    import torch
    from vllm import LLM, SamplingParams

    machine: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    if torch.cuda.is_available():
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, sequences + 1, 16)]
        machine = {"compilation_config": {"cudagraph_capture_sizes": sizes}, "attention_backend": "FLASH_ATTN"}
    llm = LLM(
        folder, skip_tokenizer_init=True, max_model_len=max(64, 2 * tokens), max_num_seqs=sequences, enable_prefix_caching=False,
        generation_config="vllm", **machine
    )  # fmt: skip
    wanted = {"logprobs": 0} if log_probs else {}
    for repeat in range(REPEATS + 1):
        most = tokens if repeat else min(tokens, WARM_UP_TOKENS)
        settings = SamplingParams(max_tokens=most, ignore_eos=True, detokenize=False, temperature=1.0, **wanted)
        barrier.wait(LONGEST_S)
        start = time.monotonic()
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts(sequences)], settings, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == most for answer in answers), repeat
        out.put((repeat, start, time.monotonic()))


def seconds(function: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[float]:
    """Run a process for each of the arguments; return the seconds of each repeat, from the first that began to the last that ended."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(len(arguments)), context.Queue()
    processes = [context.Process(target=function, args=(*given, barrier, out)) for given in arguments]
    for process in processes:
        process.start()
    spans: dict[int, list[tuple[float, float]]] = {}
    try:
        for _ in range(len(arguments) * (REPEATS + 1)):
            repeat, start, end = out.get(timeout=LONGEST_S)
            spans.setdefault(repeat, []).append((start, end))
    finally:
        for process in processes:
            process.join(15)  # vLLM ends the process of its engine
            process.kill()
    return [max(end for _, end in found) - min(start for start, _ in found) for repeat, found in sorted(spans.items()) if repeat > 0]


def parsed() -> argparse.Namespace:
    parser = command_line(__doc__, smoke="few and short responses of a tiny model")
    parser.add_argument("folder", help="a model folder, smollm2, or the name of a shape of shapes.py")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 4], help="rlgraph's engines on the GPU")
    parser.add_argument("--models", default=".models")
    given = parser.parse_args()
    if given.smoke:
        given.sequences, given.tokens = 8, 8
    return given


def model(name: str, models: str) -> str:
    import rlgraph as rg
    from benchmarks.lib.shapes import SHAPES, random_model

    if name in SHAPES:
        return random_model(name, models)
    return str(rg.model_folder(name)) if name in ("smollm2", "tiny") else name


def main() -> None:
    given = parsed()
    folder = model(given.folder, given.models)
    size = given.sequences, given.tokens
    ways: dict[str, tuple[Callable[..., None], list[tuple[Any, ...]]]] = {
        f"rlgraph, {count} engine{'s' if count > 1 else ''}": (ours, [(folder, *size, count, index) for index in range(count)])
        for count in given.engines
    }
    ways["vllm"] = (plain, [(folder, *size, False)])
    ways["vllm, with log-probs"] = (plain, [(folder, *size, True)])
    found: dict[str, Any] = {"model": given.folder, "sequences": given.sequences, "tokens": given.tokens, "seconds": {}, "spread_s": {}}
    for name, way in ways.items():
        times = seconds(*way)
        found["seconds"][name], found["spread_s"][name] = statistics.median(times), [min(times), max(times)]
        print(f"{name}: {found['seconds'][name]:.2f} s, {given.sequences * given.tokens / found['seconds'][name]:.0f} tokens/s", flush=True)
        # after each way, so that a run that is stopped keeps what it has
        write_measured(given.json, found)
    best = min(value for name, value in found["seconds"].items() if name.startswith("rlgraph"))
    for name in ("vllm, with log-probs", "vllm"):
        print(f"tokens/s of rlgraph, which returns log-probs, over those of {name}: {found['seconds'][name] / best:.2f}")


if __name__ == "__main__":
    main()
