"""Why an engine with fp8 weights differs from itself: the kernels that multiply few rows and many, and what a trained model makes of it.

    python benchmarks/speed/fp8_noise.py [products] [engines] [--json PATH] [--seconds 20] [--smoke]

* `products`: vLLM's product of fp8 matrices has another kernel for at most 16, 64 and 128 rows and for more. All add up in the registers
  of the tensor cores, which keep fewer bits than float32. Printed are how far the first row is from the exact product, and from its own
  among 4,096 rows; beside it those of torch's kernel that adds up in float32, and of bfloat16.
* `engines`: a model of bytes is trained on this repository's texts for some seconds. Engines in fp8 and in bfloat16 write with it, and
  read what they wrote: KL of each to itself, by the number of sequences that are written at once, and of fp8 to bfloat16; the same for
  random weights of the same shape.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.lib.command import command_line, write

BEGAN = time.monotonic()
SHAPES = ((4096, 6144), (4096, 24576), (12288, 4096))  # numbers in and out of the projections of 8B
ROWS = (1, 16, 17, 64, 65, 128, 129, 4096)
COUNTS = 8, 32, 100, 200  # sequences at once: a step has as many rows
FOLDER, WRITTEN = Path(".models/bytes"), 96
MACHINE: dict[str, Any] = {"memory": 0.25, "dtype": "bfloat16"} if torch.cuda.is_available() else {"dtype": "float32"}


def say(text: str) -> None:
    print(f"  [{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


def relative(found: torch.Tensor, other: torch.Tensor) -> float:
    """The root of the mean square of a difference, of that of the other."""
    return float((found.double() - other.double()).norm() / other.double().norm())


def products(smoke: bool) -> list[dict[str, Any]]:
    """Relative errors of the first row of a product, by kernel and by the number of rows."""
    from rlgraph.engines.vllm.weights import quantise

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        import vllm._custom_ops  # noqa: F401 (its operations)
    found = []
    for into, out in SHAPES if not smoke else ((64, 32),):
        draw = torch.Generator(device).manual_seed(0)
        states, matrix = (torch.randn(n, into, generator=draw, device=device).bfloat16() for n in (ROWS[-1] if not smoke else 32, out))
        (numbers, scales), (weights, of_rows) = quantise(states), quantise(matrix * 0.02)
        exact = (numbers[0].double() @ weights.double().t()) * scales[0].double() * of_rows[:, 0].double()
        plain = states[0].double() @ matrix.double().t()

        def vllms(rows: int, numbers: Any = numbers, scales: Any = scales, weights: Any = weights, of_rows: Any = of_rows) -> torch.Tensor:
            from vllm import _custom_ops as ops

            found: torch.Tensor = ops.cutlass_scaled_mm(numbers[:rows], weights.t(), scales[:rows], of_rows, torch.bfloat16)
            return found

        def torchs(rows: int, numbers: Any = numbers, scales: Any = scales, weights: Any = weights, of_rows: Any = of_rows) -> torch.Tensor:
            given = {"scale_a": scales[:rows], "scale_b": of_rows.t(), "out_dtype": torch.bfloat16, "use_fast_accum": False}
            found: torch.Tensor = torch._scaled_mm(numbers[:rows], weights.t(), **given)
            return found

        def whole(rows: int, states: torch.Tensor = states, matrix: torch.Tensor = matrix) -> torch.Tensor:
            return states[:rows] @ matrix.t()

        ways: dict[str, tuple[Callable[[int], torch.Tensor], torch.Tensor]] = {"bfloat16": (whole, plain)}
        if device == "cuda":
            ways |= {"vLLM's fp8": (vllms, exact), "torch's fp8, float32 sums": (torchs, exact)}
        for name, (product, wanted) in ways.items():
            try:
                most = product(len(states))[0]
                row = {f"{n}": (relative(product(n)[0], wanted), relative(product(n)[0], most)) for n in ROWS if n <= len(states)}
            except Exception as error:  # noqa: BLE001 (the other kernels are still of use)
                say(f"{into} x {out}, {name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            found.append({"into": into, "out": out, "kernel": name, "rounding": relative(wanted.bfloat16(), wanted), "rows": row})
            text = ", ".join(f"{n}: {of_exact:.1e} {of_most:.1e}" for n, (of_exact, of_most) in row.items())
            say(f"{into} x {out}, {name} (rounding alone {found[-1]['rounding']:.1e}); rows: from exact, from the most rows: {text}")
    return found


def trained(seconds: float, smoke: bool) -> dict[str, Any]:
    """Train a model of bytes on the texts of this repository, and save it in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlgraph.engines.hf.pretrained import byte_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, layers = (64, 2) if smoke else (1024, 16)
    config = Qwen3Config(
        vocab_size=288,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        intermediate_size=3 * hidden,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(device)
    tokenizer = byte_tokenizer()
    files = sorted([*Path("docs").glob("*.md"), *Path("rlgraph").rglob("*.py")])[: 4 if smoke else None]
    text = torch.tensor(tokenizer("\n".join(file.read_text() for file in files))["input_ids"])
    rows, length = (2, 32) if smoke else (32, 512)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), fused=True)
    start, losses = time.monotonic(), list[float]()
    while (passed := (time.monotonic() - start) / seconds) < 1 and not (smoke and len(losses) == 3):
        at = torch.randint(len(text) - length, (rows,))
        batch = torch.stack([text[place : place + length] for place in at.tolist()]).to(device)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (len(losses) + 1) / 50) * (1 - 0.9 * passed)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.bfloat16().save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    torch.save(text[: 1 << 16].clone(), FOLDER / "text.pt")
    say(f"trained {len(losses)} steps on {len(text)} bytes: {losses[0]:.2f} to {sum(losses[-10:]) / len(losses[-10:]):.2f} nats a byte")
    return {"steps": len(losses), "loss": losses[-1], "parameters": sum(p.numel() for p in model.parameters())}


def written(name: str, settings: dict[str, Any], counts: tuple[int, ...], samples: Path) -> dict[str, Any]:
    """KL of an engine to itself, and of fp8 to it, with the trained weights and with random ones."""
    from rlgraph.engines.hf.pretrained import parameter_shapes
    from rlgraph.engines.vllm.engine import VllmEngine

    engine = VllmEngine(FOLDER, max_model_len=256, max_sequences=max(counts), **MACHINE, **settings)
    text = torch.load(FOLDER / "text.pt")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    found: dict[str, Any] = {}
    for weights in ("trained", "random"):
        if weights == "random":
            draw = torch.Generator(device).manual_seed(1)
            made = {n: torch.empty(s, device=device, dtype=dtype) for n, s in parameter_shapes(FOLDER).items()}
            engine.load_weights(
                {n: w.normal_(0, 0.03, generator=draw) if w.dim() > 1 else w.fill_(1.0) for n, w in made.items()}, version=1
            )
        rows = []
        for count in counts:
            rows = one_count(engine, text, count)
            found[f"{weights}, itself, {count} at once"] = kl = mismatch(engine, rows)
            say(f"{name}, {weights} weights, {count} at once, to itself: {kl}")
        if name == "fp8":
            torch.save(rows, samples.with_suffix(f".{weights}.part"))
            samples.with_suffix(f".{weights}.part").rename(samples.with_suffix(f".{weights}"))
        elif "fp8" in WAYS:
            found[f"{weights}, of fp8's samples"] = kl = mismatch(engine, awaited(samples.with_suffix(f".{weights}")))
            say(f"KL(fp8 || {name}), {weights} weights: {kl}")
    return found


def one_count(engine: Any, text: torch.Tensor, count: int) -> list[tuple[list[int], list[int], list[float]]]:
    import rlgraph as rg

    given = [text[300 * row : 300 * row + 64].tolist() for row in range(count)]
    responses = engine.generate(given, rg.Sampling(max_tokens=WRITTEN, ignore_eos=True), list(range(count)))
    return [(prompt, response.tokens, response.log_probs) for prompt, response in zip(given, responses, strict=True)]


def mismatch(engine: Any, rows: Any) -> dict[str, float]:
    """How far log-probs of sampled tokens are from those that this engine gives the same tokens when it reads them."""
    differences = []
    for row, places in engine.prompt_log_probs({row: [*prompt, *tokens] for row, (prompt, tokens, _) in enumerate(rows)}, 0):
        prompt, tokens, log_probs = rows[row]
        read = [place[token] for place, token in zip(places[len(prompt) :], tokens, strict=True)]
        differences += [sampled - own for sampled, own in zip(log_probs, read, strict=True)]
    found = torch.tensor(differences)
    k3 = (torch.exp(-found) - 1 + found).mean().item()
    numbers = {"kl": found.mean().item(), "k3": k3, "mean_abs": found.abs().mean().item()}
    return {key: round(number, 6) for key, number in numbers.items()} | {"tokens": len(found)}


def awaited(path: Path, limit_s: float = 90.0) -> Any:
    """What the other engine saved, once it is there."""
    until = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} is not there after {limit_s:.0f} s")
        time.sleep(0.1)
    return torch.load(path)


def child(name: str, settings: dict[str, Any], counts: tuple[int, ...], samples: Path, results: Any) -> None:
    try:
        results.put((name, written(name, settings, counts, samples)))
    except BaseException:  # noqa: BLE001 (whatever it is, its traceback is printed)
        traceback.print_exc()
        results.put((name, {"failed": traceback.format_exc()[-500:]}))


WAYS: dict[str, dict[str, Any]] = (
    {"fp8": {"weights_dtype": "fp8"}, "bfloat16": {}} if torch.cuda.is_available() else {"float32": {}}  # a CPU has no fp8
)


def engines(seconds: float, smoke: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"training": trained(seconds, smoke)}
    samples = FOLDER / "samples"
    for old in FOLDER.glob("samples.*"):
        old.unlink()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    given = (2,) if smoke else COUNTS, samples, results
    processes = [context.Process(target=child, args=(name, settings, *given)) for name, settings in WAYS.items()]
    for process in processes:
        process.start()
    for _ in processes:
        name, run = results.get(timeout=150)
        found[name] = run
    for process in processes:
        process.join(5)
        process.kill()
    return found


def main() -> None:
    parser = command_line(__doc__, smoke="tiny shapes, on a CPU")
    parser.add_argument("parts", nargs="*", default=["products", "engines"], metavar="PART")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training")
    given = parser.parse_args()
    from benchmarks.lib.machine import machine

    found: dict[str, Any] = {"script": "benchmarks/speed/fp8_noise.py", "machine": machine(), "parts": {}}
    for part in given.parts:
        try:
            found["parts"][part] = products(given.smoke) if part == "products" else engines(given.seconds, given.smoke)
        except Exception:  # noqa: BLE001 (the other part is still of use)
            traceback.print_exc()
        write(given.json, found)


if __name__ == "__main__":
    main()
