"""Compare, operation by operation, what an engine and an exact trainer compute for the same texts, each in a process of its own.

python -m rlgraph.engines.exact.diagnosis engine FOLDER DEVICE OUT    # samples, and keeps what the engine computed
python -m rlgraph.engines.exact.diagnosis trainer FOLDER DEVICE OUT   # computes the same texts, and compares
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rlgraph.columns import Columns
from rlgraph.engines.amx import leave_out_broken_amx
from rlgraph.engines.exact.witness import Witness, merged, names, of_text, watch_positions, watch_rotation
from rlgraph.errors import DataError

LENGTHS = (9, 40, 90)  # of prompts: further apart than texts have tokens
TOKENS = 8
FIRST_ID, LAST_ID = 5, 200  # that every model has
LOG_PROBS = "log_probs"
LIMIT_S = 600.0  # for each of the two


@dataclass(frozen=True)
class ComparedOperation:
    """Rows of prompts and of decoded tokens that an operation gave other numbers for in the trainer, and by how much."""

    name: str
    prompt_differs: int
    prompt_rows: int
    decoded_differs: int
    decoded_rows: int
    most: float

    @property
    def equal(self) -> bool:
        return self.prompt_differs + self.decoded_differs == 0


def compare(folder: str, device: str) -> list[ComparedOperation]:
    """Run both processes, and give the operations of the model in the order of their computation. Raises DataError if one of them fails."""
    with tempfile.TemporaryDirectory() as out:
        for side in ("engine", "trainer"):
            command = [sys.executable, "-m", "rlgraph.engines.exact.diagnosis", side, folder, device, out]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
                raise DataError(f"'{folder}': the {side} of the comparison ended with code {done.returncode}: {last}")
        return msgspec.json.decode((Path(out) / "found.json").read_bytes(), type=list[ComparedOperation])


def prompts() -> list[list[int]]:
    """The texts that are compared."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(FIRST_ID, LAST_ID, (length,), generator=draw).tolist() for length in LENGTHS]


def engine_side(folder: str, device: str, out: Path) -> None:
    """Sample with the engine, and keep what its operations gave."""
    from rlgraph.engines.api import Sampling
    from rlgraph.engines.vllm.engine import VllmEngine

    more: dict[str, Any] = {"threads": 1, "dtype": "float32"}
    if device == "cuda":
        eager = {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}, "enforce_eager": True}  # what is recorded calls no module
        more = {"dtype": "bfloat16", "engine_args": eager}
    engine = VllmEngine(folder, max_model_len=256, kv_cache_bytes=1 << 30, max_sequences=8, exact=True, **more)
    model = engine.model()
    witness = Witness(model)
    watch_positions(model, witness)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    responses = engine.generate(prompts(), sampling, list(range(len(LENGTHS))))
    witness.leave()
    found = [
        (list(response.tokens), list(response.log_probs), {name: rows.cpu() for name, rows in of_text(witness, length, TOKENS).items()})
        for length, response in zip(LENGTHS, responses, strict=True)
    ]
    torch.save(found, out / "seen.pt")
    engine.close()


def trainer_side(folder: str, device: str, out: Path) -> None:
    """Compute the same texts with the trainer, and compare each operation."""
    from rlgraph.engines.forward.policy_head import PolicyHead
    from rlgraph.engines.fsdp.adamw import AdamW
    from rlgraph.engines.fsdp.engine import FsdpEngine

    torch.set_num_threads(1)
    head = PolicyHead(folder)
    engine = FsdpEngine(head, optimizer=AdamW(), device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32, exact=True)
    found = compared(head, engine, torch.load(out / "seen.pt", weights_only=True))
    (out / "found.json").write_bytes(msgspec.json.encode(found))
    engine.close()


def compared(head: Any, engine: Any, seen: list[tuple[list[int], list[float], dict[str, torch.Tensor]]]) -> list[ComparedOperation]:
    """Compare what a trainer computes of the texts with what the engine was seen to compute."""
    order = [*names(len(head.layers)), LOG_PROBS]
    found: dict[str, list[ComparedOperation]] = {}
    for prompt, (tokens, log_probs, engines) in zip(prompts(), seen, strict=True):
        trainers = _seen_in_trainer(head, engine, _batch(prompt, tokens))
        both = engines | {LOG_PROBS: torch.tensor(log_probs)[:, None]}
        for name in (name for name in order if name in trainers and name in both):
            border = 0 if name == LOG_PROBS else len(prompt)
            found.setdefault(name, []).append(_differs(name, trainers[name], both[name], border))
    return [_added_up(found[name]) for name in order if name in found]


def _seen_in_trainer(head: Any, engine: Any, batch: Columns) -> dict[str, torch.Tensor]:
    witness = Witness(head.model)
    with watch_rotation(head.layers[0].self_attn, witness):
        log_probs = engine.scores(batch)[0]
    witness.leave()
    (seen,) = witness.passes
    return merged({name: rows.cpu() for name, rows in seen.items()}) | {LOG_PROBS: log_probs[:, None]}


def _batch(prompt: list[int], tokens: list[int]) -> Columns:
    columns = {"prompts": torch.tensor([prompt]), "responses": torch.tensor([tokens])}
    return columns | {f"{name}_mask": torch.ones_like(columns[f"{name}s"]).bool() for name in ("prompt", "response")}


def _differs(name: str, own: torch.Tensor, other: torch.Tensor, border: int) -> ComparedOperation:
    rows = min(len(own), len(other))  # an engine may have computed a token after the last one
    differ = (own[:rows] != other[:rows]).any(-1)
    most = (own[:rows].float() - other[:rows].float()).abs().max().item()
    return ComparedOperation(name, int(differ[:border].sum()), border, int(differ[border:].sum()), rows - border, most)


def _added_up(parts: list[ComparedOperation]) -> ComparedOperation:
    return ComparedOperation(
        parts[0].name,
        sum(part.prompt_differs for part in parts),
        sum(part.prompt_rows for part in parts),
        sum(part.decoded_differs for part in parts),
        sum(part.decoded_rows for part in parts),
        max(part.most for part in parts),
    )


if __name__ == "__main__":
    leave_out_broken_amx()
    {"engine": engine_side, "trainer": trainer_side}[sys.argv[1]](sys.argv[2], sys.argv[3], Path(sys.argv[4]))
