"""Parts of `small_gpu.py` that compare engines: fp8 weights beside bfloat16, drafted tokens beside none."""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import rlgraph as rg
from benchmarks.lib.shapes import random_model
from benchmarks.speed.small_gpu import say

FOLDER = ".models"
SWAPS = 6
PROMPTS = 24  # tokens of each
LONGEST_S = 180.0


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """Run a function in a process of its own: vLLM leaves its memory to no other engine of a process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, given).get(LONGEST_S)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def weights_of(folder: str, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a folder's names and shapes on this device; the same in every process."""
    from rlgraph.engines.hf.pretrained import parameter_shapes

    device, dtype = ("cuda", torch.bfloat16) if on_gpu() else ("cpu", torch.float32)
    draw = torch.Generator(device).manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            wide = 4.0 if name == "model.norm.weight" else 1.0  # logits of a spread of 4: about 4 nats of entropy, as text has
            return torch.full(shape, wide, device=device, dtype=dtype)
        return torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02, generator=draw)

    return {name: one(name, shape) for name, shape in parameter_shapes(folder).items()}


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 200 + 5 for j in range(PROMPTS)] for i in range(count)]


def timed(engine: Any, count: int, tokens: int, repeats: int = 2) -> list[float]:
    """Seconds of each time that `count` responses of so many tokens are written, after a short one."""
    engine.generate(prompts(count), rg.Sampling(max_tokens=4, ignore_eos=True), list(range(count)))
    seconds = []
    for repeat in range(repeats):
        start = time.monotonic()
        engine.generate(prompts(count), rg.Sampling(max_tokens=tokens, ignore_eos=True), [repeat * count + row for row in range(count)])
        seconds.append(time.monotonic() - start)
    return seconds


def one_engine(folder: str, settings: dict[str, Any], counts: tuple[int, ...], tokens: int, sampled: Any) -> dict[str, Any]:
    """Speed, swaps, memory and log-probs of an engine; those of the responses `sampled` elsewhere, read by this one, if given."""
    from rlgraph.engines.vllm.engine import VllmEngine

    start = time.monotonic()
    machine = {"memory": 0.6, "dtype": "bfloat16"} if on_gpu() else {"dtype": "float32"}
    engine = VllmEngine(folder, max_model_len=PROMPTS + tokens + 8, max_sequences=max(counts), random_weights=True, **machine, **settings)
    found: dict[str, Any] = {"start_s": time.monotonic() - start, "settings": settings}
    weights = weights_of(folder, 1)
    swaps = []
    for version in range(SWAPS if on_gpu() else 2):
        start = time.monotonic()
        engine.load_weights(weights, version=version)
        if on_gpu():
            torch.cuda.synchronize()
        swaps.append(time.monotonic() - start)
    model = engine.model()
    held = {tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in [*model.parameters(), *model.buffers()]}
    found |= {"first_swap_s": swaps[0], "swap_s": statistics.median(swaps[1:]), "weights_bytes": sum(held.values())}
    found["kv_cache_tokens"] = engine.llm.vllm_config.cache_config.num_gpu_blocks * engine.llm.vllm_config.cache_config.block_size
    for count in counts:
        seconds = statistics.median(timed(engine, count, tokens))
        found[f"tokens_per_s_{count}"] = count * tokens / seconds
    del weights
    rows = [(prompt, response.tokens, response.log_probs) for prompt, response in own_responses(engine, min(tokens, 128))]
    found["mismatch_own"] = mismatch(engine, rows)
    if sampled is not None:
        found["mismatch_of_sampled"] = mismatch(engine, sampled)
    return found | {"sampled": rows}


def own_responses(engine: Any, tokens: int) -> list[tuple[list[int], Any]]:
    given = prompts(32 if on_gpu() else 2)
    responses = engine.generate(given, rg.Sampling(max_tokens=tokens, ignore_eos=True), list(range(len(given))))
    return list(zip(given, responses, strict=True))


def mismatch(engine: Any, rows: Any) -> dict[str, float]:
    """How far log-probs of sampled tokens are from those that this engine gives the same tokens when it reads them.

    `kl` is the mean of their difference, an estimate of KL(sampler || reader); `k3` the one that is never negative.
    """
    texts = {row: [*prompt, *tokens] for row, (prompt, tokens, _) in enumerate(rows)}
    differences = []
    for row, _, read_log_probs in engine.prompt_log_probs(texts, 0):
        prompt, _, log_probs = rows[row]
        read = read_log_probs[len(prompt) - 1 :, 0].tolist()
        differences += [sampled - own for sampled, own in zip(log_probs, read, strict=True)]
    found = torch.tensor(differences)
    return {
        "kl": found.mean().item(),
        "k3": (torch.exp(-found) - 1 + found).mean().item(),
        "mean_abs": found.abs().mean().item(),
        "max_abs": found.abs().max().item(),
        "tokens": len(found),
    }


WAYS: dict[str, dict[str, Any]] = {
    "fp8": {"weights_dtype": "fp8"},
    "bfloat16": {},
    "fp8, keys and values too": {"weights_dtype": "fp8", "engine_args": {"kv_cache_dtype": "fp8"}},
}


def quantised(shape: str, smoke: bool, names: tuple[str, ...] = ("fp8", "bfloat16"), most: int = 256) -> dict[str, Any]:
    folder = random_model("toy" if smoke else shape, FOLDER, headers_only=True)
    counts, tokens = ((2,), 6) if smoke else ((16, most), most)
    ways = {"float32": {}} if smoke else {name: WAYS[name] for name in names}
    found: dict[str, Any] = {"shape": shape, "tokens": tokens, "engines": {}}
    sampled = None
    for name, settings in ways.items():
        try:
            run = apart(one_engine, folder, settings, counts, tokens, sampled)
        except Exception as error:  # noqa: BLE001 (the other engines are still of use)
            say(f"{shape}, {name}: {type(error).__name__}: {error}")
            found["engines"][name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        rows = run.pop("sampled")
        sampled = sampled or rows  # of the first engine, which the others read
        found["engines"][name] = run
        speed = ", ".join(f"{run[f'tokens_per_s_{count}']:.0f} tokens/s of {count}" for count in counts)
        say(
            f"{shape}, {name}: up in {run['start_s']:.1f} s, swap {run['swap_s'] * 1e3:.1f} ms (first {run['first_swap_s'] * 1e3:.0f}), "
            f"weights {run['weights_bytes'] / 1e9:.2f} GB, room for {run['kv_cache_tokens']} tokens, {speed}"
        )
        say(f"   own {run['mismatch_own']}; of the first's samples {run.get('mismatch_of_sampled')}")
    return found


def fp8(smoke: bool) -> dict[str, Any]:
    return quantised("4B", smoke)


def fp8_8b(smoke: bool) -> dict[str, Any]:
    return quantised("8B", smoke, most=128)


def fp8_kv(smoke: bool) -> dict[str, Any]:
    return quantised("4B", smoke, ("fp8, keys and values too", "fp8"))


def tail(count: int, most: int) -> list[int]:
    """The lengths of responses with a long tail: half are short, one in sixteen is as long as any may be."""
    return [max(8, int(most * 2 ** (-4 * (row % 16) / 15))) for row in range(count)]


def repeats(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Leave out what layers add to a token, so that the next one is the same again: every guess is right, at the cost of any model."""
    return torch.zeros_like(weight) if "o_proj" in name or "down_proj" in name else weight


def drafting(folder: str, settings: dict[str, Any], count: int, most: int, prompt: int, best: bool) -> dict[str, Any]:
    """Rollouts of one engine: text that repeats itself, and text that does not; all of one length, and with a long tail."""
    from rlgraph.engines.api import Request
    from rlgraph.engines.vllm.engine import VllmEngine

    start = time.monotonic()
    machine = {"memory": 0.6, "dtype": "bfloat16"} if on_gpu() else {"dtype": "float32"}
    engine = VllmEngine(folder, max_model_len=prompt + most + 8, max_sequences=count, random_weights=True, **machine, **settings)
    found: dict[str, Any] = {"start_s": time.monotonic() - start, "runs": {}}
    engine.load_weights({name: repeats(name, weight) if best else weight for name, weight in weights_of(folder, 1).items()}, version=0)
    texts = {
        "repeating": [[(7 * row + step % 12) % 200 + 5 for step in range(prompt)] for row in range(count)],
        "random": [torch.randint(5, 200, (prompt,), generator=torch.Generator().manual_seed(row)).tolist() for row in range(count)],
    }
    engine.generate(texts["random"], rg.Sampling(max_tokens=4, ignore_eos=True), list(range(count)))
    runs = [("repeating", "equal", 0.0), ("repeating", "tail", 0.0), ("repeating", "tail", 1.0), ("random", "tail", 1.0)]
    runs = [("repeating", "equal", 1.0), ("repeating", "tail", 1.0)] if best else runs
    for text, name, temperature in runs:
        lengths = [most // 2] * count if name == "equal" else tail(count, most)
        engine.decoded = engine.decodings = 0
        start = time.monotonic()
        for row, length in enumerate(lengths):
            sampling = rg.Sampling(max_tokens=length, ignore_eos=True, temperature=temperature)
            engine.submit(Request(f"{row}", texts[text][row], sampling, row))
        done: dict[str, Any] = {}
        while len(done) < count:
            done |= engine.step()
        seconds = time.monotonic() - start
        rows = [(texts[text][row], done[f"{row}"].tokens, done[f"{row}"].log_probs) for row in range(count)]
        found["runs"][f"{text}, {name}, temperature {temperature}"] = {
            "seconds": seconds,
            "tokens_per_s": sum(lengths) / seconds,
            "accepted_a_step": engine.decoded / max(engine.decodings, 1) - 1,
            "rows": rows,
            "read_again": mismatch(engine, rows[:8]) if temperature else None,
        }
        say(f"{settings}, {text}, {name}, {temperature=}: {seconds:.2f} s, {engine.decoded / max(engine.decodings, 1):.2f} tokens a step")
    return found


def speculative(smoke: bool) -> dict[str, Any]:
    return guessed(smoke, best=False)


def speculative_best(smoke: bool) -> dict[str, Any]:
    return guessed(smoke, best=True)


def guessed(smoke: bool, *, best: bool) -> dict[str, Any]:
    """Drafts beside none, with the same seeds: how many tokens are the same ones, and how far their log-probs are."""
    from rlgraph.values.drafts import PromptLookup

    shape, count, most, prompt = ("toy", 2, 16, 24) if smoke else ("4B", 64, 768, 96)
    folder = random_model(shape, FOLDER, headers_only=True)
    ways: dict[str, dict[str, Any]] = (
        {"none": {}} if smoke else {"none": {}, "prompt look-up": {"drafts": PromptLookup(tokens=4, below=32)}}
    )
    runs = {name: apart(drafting, folder, settings, count, most, prompt, best) for name, settings in ways.items()}
    found: dict[str, Any] = {"shape": shape, "sequences": count, "tokens": most, "engines": {}, "against_none": {}}
    plain = {what: own.pop("rows") for what, own in runs["none"]["runs"].items()}
    for name, run in runs.items():
        for what, own in run["runs"].items() if name != "none" else ():
            found["against_none"][f"{name}: {what}"] = compared(plain[what], own.pop("rows"))
        found["engines"][name] = run
    for what, own in found["against_none"].items():
        say(f"{what}: {own}")
    return found


def compared(some: Any, others: Any) -> dict[str, float]:
    """How long responses with the same seeds are the same, and the distance of log-probs up to there."""
    same, tokens, distances = 0, 0, [0.0]
    for (_, a, log_a), (_, b, log_b) in zip(some, others, strict=True):
        equal = next((place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same, tokens = same + equal, tokens + len(a)
        distances += [abs(x - y) for x, y in zip(log_a[:equal], log_b[:equal], strict=True)]
    return {"same_tokens": same / tokens, "tokens": tokens, "log_probs_max": max(distances), "log_probs_mean": statistics.fmean(distances)}
