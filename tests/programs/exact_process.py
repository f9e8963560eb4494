"""A process that trains models exactly and scores what an engine sampled of them: `python exact_process.py trainer OUT FOLDER …`.

It starts a second process with an engine of each model, one after the other, which samples of the weights before the first and after
the last update. What is found of a model lies in the folder of its name in OUT.
"""

import gc
import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.tiny import WeightedLikelihood, batch_of
from torch.nn.functional import linear, scaled_dot_product_attention

UPDATES, TOKENS = 3, 40
LENGTHS = (1, 7, 31, 33, 40, 150)
TEMPERATURES = (1.0, 0.7)
VOCAB = 250


def prompts() -> list[list[int]]:
    """Prompts of these lengths, each twice: the second one finds the blocks of the first one in the engine's cache."""
    draw = torch.Generator().manual_seed(1)
    return [prompt for length in LENGTHS for prompt in [torch.randint(1, VOCAB, (length,), generator=draw).tolist()] * 2]


def engine(out: Path, folders: list[Path]) -> None:
    for folder in folders:
        sample(folder, out / folder.name)
        gc.collect()


def sample(folder: Path, out: Path) -> None:
    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    made = VllmEngine(folder, max_model_len=256, dtype="float32", kv_cache_bytes=64 << 20, threads=1)
    found = []
    for version in (0, 1):
        made.load_weights(torch.load(out / f"weights{version}.pt"))
        for temperature in TEMPERATURES:
            sampling = Sampling(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)
            responses = made.generate(prompts(), sampling, list(range(len(prompts()))))
            found.append((version, temperature, [(list(r.tokens), list(r.log_probs)) for r in responses]))
    torch.save(found, out / "sampled.pt")
    made.close()


def batch(responses: list[tuple[list[int], list[float]]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    width = max(LENGTHS)
    rows = [torch.tensor([0] * (width - len(p)) + p) for p in prompts()]
    mask = [torch.arange(width) >= width - len(p) for p in prompts()]
    tokens = torch.tensor([tokens for tokens, _ in responses])
    columns = {"prompts": torch.stack(rows), "prompt_mask": torch.stack(mask), "responses": tokens}
    return columns | {"response_mask": torch.ones_like(tokens).bool()}, torch.tensor([log_probs for _, log_probs in responses])


@cache
def own_rotations() -> tuple[Any, Any]:
    """The engine's rotation and its plain form, as they are before a test puts another in their place."""
    from rlgraph.engines.exact.cpu import rotate_heads, rotated_plainly

    return rotate_heads, rotated_plainly


def plain_rotation(states: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate by products and sums apart; in double precision where this CPU's kernel rounds as they do, which it does without AVX-512."""
    rotated, rotated_plainly = own_rotations()

    def apart(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return rotated_plainly(heads.transpose(0, 1)[None], positions, angles)[0].transpose(0, 1).contiguous()

    found = apart(states, table)
    return apart(states.double(), table.double()).to(states.dtype) if torch.equal(found, rotated(states, positions, table)) else found


def plain_attention(query: Any, key: Any, value: Any, starts: list[int], prompts: list[int], scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    parts = [
        scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=scale, enable_gqa=True)
        for a, b in pairwise(starts)
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def exact_product(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from rlgraph.engines.exact.cpu import ExactLinear

    made = ExactLinear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = torch.nn.Parameter(weight)
    return made(states).detach()


def rows_match(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[bool]:
    """Whether the rows of a product of 200 are those of products of fewer, for matrices of a model of 135M."""
    draw, same = torch.Generator().manual_seed(0), []
    for into, out in ((576, 1536), (1536, 576), (576, 960)):
        states, weight = torch.randn(200, into, generator=draw), torch.randn(out, into, generator=draw)
        whole = product(states, weight)
        same += [torch.equal(product(states[:rows], weight), whole[:rows]) for rows in (1, 2, 7, 16, 33, 129)]
    return same


OWN: dict[str, tuple[Callable[[], Any], str, Any]] = {  # what is put back, and where: each must be seen
    "own rotation": (lambda: importlib.import_module("rlgraph.engines.exact.cpu"), "rotate_heads", plain_rotation),
    "own attention": (lambda: importlib.import_module("rlgraph.engines.exact.cpu"), "attend_in_order", plain_attention),
    "own log-softmax": (lambda: torch.Tensor, "log_softmax", lambda scaled, dim: scaled - scaled.logsumexp(dim, keepdim=True)),
    "stale weights": (lambda: importlib.import_module("rlgraph.engines.exact.cpu").ExactLinear, "forget", lambda self: None),
}


def trainer(out: Path, folders: list[Path]) -> None:
    torch.set_num_threads(1)
    trained = [(train(folder, out / folder.name), out / folder.name) for folder in folders]
    subprocess.run([sys.executable, __file__, "engine", str(out), *map(str, folders)], check=True, timeout=500)
    for (made, steps), place in trained:
        torch.save({"steps": steps, **compare_scores(made, place)}, place / "found.pt")
        made.close()


def train(folder: Path, out: Path) -> tuple[Any, list[Any]]:
    """Train exactly and not so, side by side, and keep the weights before and after."""
    from support.trainer_engines import fsdp_engine

    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.values.optimizers import AdamW

    out.mkdir()
    settings: dict[str, Any] = {"optimizer": AdamW(lr=1e-2), "dtype": torch.float32}
    made = fsdp_engine(PolicyHead(folder), exact=True, micro_batch_tokens=600, **settings)
    plain = fsdp_engine(PolicyHead(folder), flat=True, micro_batch_tokens=600, **settings)
    given, steps = batch_of([7, 2, 5, 5, 1, 12], seed=3), []
    for version in (0, 1):
        torch.save({name: tensor.clone() for name, tensor in made.weights().items()}, out / f"weights{version}.pt")
        for _ in range(0 if version else UPDATES):
            steps.append([each.update(given, WeightedLikelihood()) for each in (made, plain)])
    return made, steps


def compare_scores(made: Any, out: Path) -> dict[str, Any]:
    """Compare the scores with what the engine sampled: as they are, in other passes, and with one operation put back after the other."""
    sampled_of = torch.load(out / "sampled.pt")
    weights = [torch.load(out / f"weights{version}.pt") for version in (0, 1)]

    def compared() -> list[tuple[int, int, float]]:
        counts = []
        for version, temperature, responses in sampled_of:
            made.load_weights(weights[version])
            columns, sampled = batch(responses)
            own = made.scores(columns, temperature=temperature)
            counts.append((int((own == sampled).sum()), own.numel(), float((own - sampled).abs().max())))
        return counts

    own_rotations()
    found: dict[str, Any] = {"exact": compared()}
    made.micro_batch_tokens = 60
    found["other passes"] = compared()
    for name, (place, attribute, own) in OWN.items():
        kept = getattr(place(), attribute)
        setattr(place(), attribute, own)
        found[name] = compared()
        setattr(place(), attribute, kept)
    found["exact again"] = compared()
    found["rows"] = {name: rows_match(product) for name, product in (("exact", exact_product), ("own", linear))}
    return found


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](Path(sys.argv[2]), list(map(Path, sys.argv[3:])))
