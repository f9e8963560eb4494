"""exact=True on an NVIDIA GPU: tokens whose log-probs equal vLLM's in every bit, and what the trainer's part of a step costs.

    python benchmarks/speed/exact_gpu.py [--models smollm2,1.7B,8B-4] [--limit 150] --json OUT.json
    python benchmarks/speed/exact_gpu.py --models smollm2 --decode smollm2,1.7B     # with tokens a second
    python benchmarks/speed/exact_gpu.py --smoke                # its first seconds, on a CPU

For each model one process samples and one trains, in bfloat16. In each step the engine samples for hundreds of prompts at once, and in
every fourth also for one alone, for 7 and for 64; at temperatures 1 and 0.7 in turns. Every third step has prompts of 3 to 4 thousand
tokens, which are read in chunks and, the second time, found in the cache; every fourth begins after sleep. The trainer scores every
token, in passes of other sizes in other steps. With SmolLM2 it then learns and the engine takes the new weights. In the end trainers with
and without exact take turns at one batch, and so do engines; and the gradients of both trainers are compared with that of one in float32,
each by its own log-probs of the weights that sampled.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.served import BEGAN, Served, say

LOW, HIGH = 5, 200  # ids that every model has
Row = tuple[list[int], list[int], list[float]]  # a prompt, its response and the response's log-probs


def texts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(LOW, HIGH, (length,), generator=draw).tolist() for length in lengths]


def batch_of(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    import torch

    width, length = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    return {
        "prompts": torch.tensor([[0] * (width - len(p)) + p for p, _ in rows]),
        "prompt_mask": torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p, _ in rows]),
        "responses": torch.tensor([r + [0] * (length - len(r)) for _, r in rows]),
        "response_mask": torch.tensor([[True] * len(r) + [False] * (length - len(r)) for _, r in rows]),
    }


class Engine:
    """A process with the engine."""

    def __init__(self, folder: str, cuda: bool, sequences: int, kv: int, context: int, exact: bool = True) -> None:
        from rlgraph.engines.vllm.engine import VllmEngine

        more: dict[str, Any] = {"shared": True, "memory": 0.08, "dtype": "bfloat16"} if cuda else {"threads": 1, "dtype": "float32"}
        self.engine = VllmEngine(folder, max_model_len=context, kv_cache_bytes=kv, max_sequences=sequences, exact=exact, **more)

    def decode(self, sequences: int, prompt: int, tokens: int, seed: int) -> float:
        """Count the tokens a second of so many responses at once."""
        from rlgraph.values.sampling import Sampling

        prompts, sampling = texts([prompt] * sequences, seed), Sampling(max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        self.engine.generate(prompts, sampling, list(range(sequences)))
        return sequences * tokens / (time.perf_counter() - start)

    def sample(self, step: int, groups: list[list[int]], tokens: int, out: str) -> None:
        import torch

        from rlgraph.values.sampling import Sampling

        if step % 4 == 3:
            self.engine.sleep()
            self.engine.wake()
        sampling, rows = Sampling(max_tokens=tokens, temperature=temperature(step), ignore_eos=True), []
        for index, lengths in enumerate(groups):
            prompts = texts(lengths, 1000 * step + sum(lengths) % 997)  # the same lengths: the same texts
            seeds = list(range(100_000 * step + 1000 * index, 100_000 * step + 1000 * index + len(prompts)))
            for prompt, response in zip(prompts, self.engine.generate(prompts, sampling, seeds), strict=True):
                rows.append((prompt, list(response.tokens), list(response.log_probs)))
        torch.save(rows, out)

    def load(self, path: str) -> None:
        import torch

        self.engine.load_weights(torch.load(path))


class Trainer:
    """A process with the exact trainer, and at last one without exact."""

    def __init__(self, folder: str, cuda: bool, passes: int) -> None:
        import torch

        self.folder, self.cuda, self.passes = folder, cuda, passes
        if not cuda:
            torch.set_num_threads(1)
        self.engine = self._made(exact=True)

    def _made(self, *, exact: bool, dtype: Any = None) -> Any:
        import torch

        import rlgraph as rg
        from rlgraph.engines.forward.head import PolicyHead
        from rlgraph.engines.fsdp.engine import FsdpEngine
        from rlgraph.values.trainer import TrainerSettings

        where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if self.cuda else {"dtype": torch.float32}
        where |= {} if dtype is None else {"dtype": dtype}
        adam = rg.AdamW(lr=1e-5)
        settings = TrainerSettings(exact=exact, optimizer=adam, micro_batch_tokens=self.passes)
        return FsdpEngine(PolicyHead(self.folder), settings, flat=True, **where)

    def compare(self, step: int, path: str) -> dict[str, float]:
        """Score every token; count those that differ from the engine's in any bit."""
        import torch

        rows = torch.load(path)
        self.engine.micro_batch_tokens = self.passes if step % 2 else self.passes // 3 + 5
        own = self.engine.scores(batch_of([(p, r) for p, r, _ in rows]), temperature=temperature(step))
        away = (own - torch.tensor([log_probs for _, _, log_probs in rows])).abs()
        return {"tokens": away.numel(), "different": int((away > 0).sum()), "most_nats": away.max().item()}

    def update(self, path: str, out: str) -> float:
        """Learn from some of the rows, and write the new weights."""
        import torch

        import rlgraph as rg

        batch = self._batch([(p, r) for p, r, _ in torch.load(path) if len(p) < 1000][-64:], self.engine)
        metrics = self.engine.update(batch, rg.ClippedLoss())
        rounded = torch.bfloat16 if self.cuda else torch.float32
        torch.save({name: tensor.detach().to(rounded).cpu().clone() for name, tensor in self.engine.weights().items()}, out)
        return float(metrics["actor/grad_norm"])

    def _batch(self, rows: list[tuple[list[int], list[int]]], engine: Any) -> dict[str, Any]:
        import torch

        batch = batch_of(rows)
        advantages = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(3))
        return batch | {"advantages": advantages, "old_log_probs": engine.scores(batch)}

    def price(self, rows: int, prompt: int, response: int, rounds: int) -> dict[str, Any]:
        """Seconds of scores and updates of both trainers, in turns."""
        import rlgraph as rg

        both = {"exact": self.engine, "plain": self._twin()}
        for engine in both.values():
            engine.micro_batch_tokens = self.passes
        batch = self._batch(list(zip(texts([prompt] * rows, 5), texts([response] * rows, 6), strict=True)), self.engine)
        found: dict[str, Any] = {}
        works: dict[str, Callable[[Any], object]] = {
            "scores": lambda engine: engine.scores(batch),
            "update": lambda engine: engine.update(batch, rg.ClippedLoss()),
        }
        for name, work in works.items():
            times: dict[str, list[float]] = {kind: [] for kind in both}
            for _ in range(rounds + 1):
                for kind, engine in both.items():
                    self._libraries(exact=kind == "exact")
                    start = time.perf_counter()
                    work(engine)
                    times[kind].append(time.perf_counter() - start)
            ratios = [a / b for a, b in zip(times["exact"][1:], times["plain"][1:], strict=True)]
            found[name] = {f"{kind}_s": round(statistics.median(each[1:]), 4) for kind, each in times.items()}
            found[name] |= {"ratio": round(statistics.median(ratios), 3), "spread": [round(min(ratios), 3), round(max(ratios), 3)]}
        del both, engine, works, work
        self._forget_twins()
        return found

    def gradients(self, rows: int, prompt: int, response: int) -> dict[str, float]:
        """How far the gradients of both trainers are from that of float32, as parts of its length."""
        import torch

        pairs = list(zip(texts([prompt] * rows, 7), texts([response] * rows, 8), strict=True))
        found: dict[str, dict[str, Any]] = {}
        for kind, dtype in (("exact", None), ("plain", None), ("float32", torch.float32)):
            self._libraries(exact=kind == "exact")
            engine = self.engine if kind == "exact" else self._twin(dtype)
            engine.micro_batch_tokens = self.passes
            found[kind] = gradient(engine, self._batch(pairs, engine))
            del engine
            self._forget_twins()
        away = {kind: distance(each, found["float32"]) for kind, each in found.items()}
        return {"exact": away["exact"], "plain": away["plain"], "exact_from_plain": distance(found["exact"], found["plain"])}

    def _forget_twins(self) -> None:
        import torch

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _twin(self, dtype: Any = None) -> Any:
        """A trainer without exact, with the weights of the exact one."""
        twin = self._made(exact=False, dtype=dtype)
        twin.load_weights({name: tensor.detach().clone() for name, tensor in self.engine.weights().items()})
        return twin

    def _libraries(self, *, exact: bool) -> None:
        """The settings of cuBLAS that a process with that trainer alone has."""
        import torch

        from rlgraph.engines.exact.gpu_products import forbid_split_sums

        if self.cuda and exact:
            forbid_split_sums()
        elif self.cuda:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
            torch.backends.cuda.preferred_blas_library("cublas")


def gradient(engine: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The gradient of a batch, of which no step is taken."""
    import rlgraph as rg

    found: dict[str, Any] = {}

    def look(metrics: dict[str, float]) -> bool:
        for name, parameter in engine.trained().items():
            found[name] = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        scale = max(metrics["actor/grad_norm"] / engine.optimizer_settings.grad_clip, 1.0)
        found.update({name: tensor.float().cpu() * scale for name, tensor in found.items()})
        return False

    engine.update(batch, rg.ClippedLoss(), guard=look)
    return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far a gradient is from another, as a part of the other's length."""
    away = sum((one[name] - tensor).double().square().sum() for name, tensor in other.items())
    return float((away / sum(tensor.double().square().sum() for tensor in other.values())).sqrt())


def temperature(step: int) -> float:
    return 0.7 if step % 2 else 1.0


class Model:
    """Engine and trainer of one model, step after step."""

    def __init__(self, name: str, folder: str, given: argparse.Namespace) -> None:
        self.name, self.given, self.small = name, given, name in ("smollm2", "tiny")
        cuda, most = not given.smoke, 8 if given.smoke else 512 if self.small else 128
        self.work = str(given.work / name)
        self.most, self.tokens = most, 6 if given.smoke else 256 if self.small else 96
        passes = 200 if given.smoke else 8192 if self.small else 4096
        kv = 64 << 20 if given.smoke else 6 << 30 if self.small else 8 << 30 if name == "1.7B" else 2 << 30
        self.trainer = Served(Trainer, given.limit, folder=folder, cuda=cuda, passes=passes)
        self.settings = {"folder": folder, "cuda": cuda, "sequences": most, "kv": kv, "context": 256 if given.smoke else 4608}
        self.engine = Served(Engine, given.limit, **self.settings)
        self.found: dict[str, Any] = {"steps": 0, "tokens": 0, "different": 0, "most_nats": 0.0, "updates": 0}

    def groups(self, step: int) -> list[list[int]]:
        if self.given.smoke:
            return [[9], [5, 40, 7]]
        lengths = [16 + (37 * n + 11 * step) % (400 if self.small else 200) for n in range(self.most)]
        long = [3000 + 151 * n for n in range(6)] if step % 3 == 2 else []
        few = [lengths[:1], lengths[1:8], lengths[8:72]] if step % 4 == 0 else []
        return [*few, lengths, *([long, long] if long else [])]

    def run(self) -> None:
        try:
            self.engine.answer()
            self.trainer.answer()
            say(self.name, "engine and trainer are there")
            for step in range(self.given.steps):
                if time.time() - BEGAN > self.given.until:
                    break
                self.step(step)
        except Exception:  # noqa: BLE001 (the other models go on)
            self.found["error"] = traceback.format_exc()[-2500:]
            say(self.name, self.found["error"])
        finally:
            self.engine.leave()

    def step(self, step: int) -> None:
        self.engine.ask("sample", step=step, groups=self.groups(step), tokens=self.tokens, out=f"{self.work}.rows")
        counts = self.trainer.ask("compare", step=step, path=f"{self.work}.rows")
        self.found["steps"] += 1
        self.found["tokens"] += counts["tokens"]
        self.found["different"] += counts["different"]
        self.found["most_nats"] = max(self.found["most_nats"], counts["most_nats"])
        if self.small:
            self.found["grad_norm"] = self.trainer.ask("update", path=f"{self.work}.rows", out=f"{self.work}.weights")
            self.found["updates"] += 1
            self.engine.ask("load", path=f"{self.work}.weights")
        say(self.name, f"step {step}:", counts, "together", self.found)

    def price(self) -> None:
        try:
            sizes = {"rows": 4, "prompt": 9, "response": 9} if self.given.smoke else {"rows": 64, "prompt": 256, "response": 256}
            self.found["price"] = self.trainer.ask("price", **sizes, rounds=5 if self.small else 3)
            say(self.name, self.found["price"])
            self.found["gradients"] = self.trainer.ask("gradients", **{**sizes, "rows": sizes["rows"] // 4})
            say(self.name, "gradients", self.found["gradients"])
        except Exception:  # noqa: BLE001 (the other models go on)
            self.found["price"] = traceback.format_exc()[-2500:]
            say(self.name, self.found["price"])
        finally:
            self.trainer.leave()


def decoded(model: Model) -> dict[str, Any]:
    """Tokens a second of engines with and without exact, in turns."""
    engines = {kind: Served(Engine, model.given.limit, **model.settings, exact=kind == "exact") for kind in ("exact", "plain")}
    found: dict[str, Any] = {}
    try:
        for engine in engines.values():
            engine.answer()
        for sequences in sorted({1, min(64, model.most), model.most}):
            sizes = {"sequences": sequences, "prompt": 9 if model.given.smoke else 256, "tokens": model.tokens}
            pairs = [[engine.ask("decode", **sizes, seed=turn) for engine in engines.values()] for turn in range(5)][1:]
            ratios = sorted(plain / exact for exact, plain in pairs)
            each = dict(zip(("exact", "plain"), (statistics.median(one) for one in zip(*pairs, strict=True)), strict=True))
            found[str(sequences)] = {**each, "ratio": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}
            say(model.name, sequences, "at once:", found[str(sequences)])
    except Exception:  # noqa: BLE001 (the other models go on)
        found["error"] = traceback.format_exc()[-2500:]
        say(model.name, found["error"])
    finally:
        for engine in engines.values():
            engine.leave()
    return found


def folder_of(name: str, work: Path) -> str:
    import rlgraph as rg

    if name in ("smollm2", "tiny"):
        return rg.model_folder(name)
    from benchmarks.lib.shapes import random_model

    return random_model(name, work)


def main() -> None:
    parser = command_line(__doc__, smoke="a tiny model")
    parser.add_argument("--models", default="smollm2,1.7B,8B-4")
    parser.add_argument("--prices", default="1.7B,smollm2", help="models whose trainers are timed, in this order")
    parser.add_argument("--decode", default="smollm2,1.7B", help="models whose engines are timed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--until", type=float, default=600.0, help="seconds after which no step begins")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of the whole")
    parser.add_argument("--work", type=Path, default=Path("runs/exact_gpu"))
    given = parser.parse_args()
    if given.smoke:
        given.models, given.prices, given.decode, given.steps = "tiny", "tiny", "tiny", 3
    given.work = given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    models: dict[str, Model] = {}
    running: list[threading.Thread] = []
    for name in given.models.split(","):
        with multiprocessing.get_context("spawn").Pool(1) as made:  # this process stays without a GPU
            folder = made.apply(folder_of, (name, given.work))
        say(name, folder)
        models[name] = Model(name, folder, given)
        running.append(threading.Thread(target=models[name].run))
        running[-1].start()
    for thread in running:
        thread.join()
    for name in given.models.split(","):
        if name not in given.prices:
            models[name].trainer.leave()
    for name in given.prices.split(","):
        models[name].price()
    for name in given.decode.split(","):
        models[name].found["tokens_a_second"] = decoded(models[name])
    found: dict[str, Any] = {name: model.found for name, model in models.items()}
    found["all"] = {count: sum(model.found[count] for model in models.values()) for count in ("tokens", "different")}
    say(json.dumps(found))
    write_measured(given.json, found)


if __name__ == "__main__":
    main()
