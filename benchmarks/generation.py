"""Generation by rlgraph's engine against plain `LLM.generate` of vLLM, on one GPU with the same settings in the same run.

python benchmarks/generation.py FOLDER [--sequences 1024] [--tokens 256] [--json PATH]
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

REPEATS = 3


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 1000 + 5 for j in range(22)] for i in range(count)]


def ours(folder: str, sequences: int, tokens: int, out: Any) -> None:
    from rlgraph.engines.base import Sampling
    from rlgraph.engines.vllm import VllmEngine

    engine = VllmEngine(folder, max_model_len=2048, max_sequences=sequences)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    times = []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        responses = engine.generate(prompts(sequences), sampling, list(range(sequences)))
        times.append(time.perf_counter() - start)
        assert all(len(r.tokens) == tokens for r in responses), repeat
    out.put(times[1:])


def plain(folder: str, sequences: int, tokens: int, out: Any) -> None:
    import os

    from rlgraph.engines import vllm_arguments

    os.environ.update(vllm_arguments.ENVIRONMENT | vllm_arguments.GPU_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    share = vllm_arguments.MEMORY_ALONE
    machine = vllm_arguments.arguments(on_cpu=False, context=2048, max_sequences=sequences, kv_cache_bytes=None, share=share, shared=False)
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=2048, logprobs_mode="processed_logprobs", generation_config="vllm", **machine)
    settings = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=i, detokenize=False, temperature=1.0) for i in range(sequences)
    ]
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts(sequences)], settings, use_tqdm=False)
        times.append(time.perf_counter() - start)
    out.put(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {"sequences": given.sequences, "tokens": given.tokens}
    for name, function in (("rlgraph", ours), ("vllm", plain)):
        out = context.Queue()
        process = context.Process(target=function, args=(given.folder, given.sequences, given.tokens, out))
        process.start()
        times = out.get(timeout=240)
        process.kill()
        process.join()
        rates = [given.sequences * given.tokens / seconds for seconds in times]
        found[name] = {"tokens_per_s": statistics.median(rates), "spread": [min(rates), max(rates)]}
        print(f"{name}: {found[name]['tokens_per_s']:.0f} tokens/s", flush=True)
    found["ratio"] = found["rlgraph"]["tokens_per_s"] / found["vllm"]["tokens_per_s"]
    print(f"rlgraph over plain LLM.generate: {found['ratio']:.2f}")
    if given.json:
        from weights import machine as measured_on

        given.json.write_text(json.dumps(found | measured_on(), indent=1) + "\n")


if __name__ == "__main__":
    main()
