"""Scores of rows that a frozen model has seen before, kept on disk: the same row is not computed again, in this run or another one."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rlgraph.batching.packing import response_lengths
from rlgraph.columns import Columns
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Node
from rlgraph.nodes.base import Context, Fired, Stage, tensor_of
from rlgraph.nodes.training.policy import LogProbs
from rlgraph.nodes.training.trained_model import TOKENS

KEY = 32  # bytes of a row's hash
ENDING = ".scores"


@dataclass
class CachedScores:
    """The scores of rows by the hash of their tokens: those in the files of a folder, and what is new, in a file of this run.

    `folder` is that of one model, dtype and temperature. `writes` says whether this rank writes. All ranks read before any of them has
    written, so they know the same rows, and compute the others together. A record is the row's hash, the number of its scores, and the
    scores as float32. Raises DataError for a folder that cannot be used.
    """

    folder: Path
    writes: bool = True
    rows: dict[bytes, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.folder.glob(f"*{ENDING}")):
                self._read(file.read_bytes())
        except OSError as error:
            raise DataError(f"the cache of scores '{self.folder}' cannot be used ({error}); give a folder that can be written") from None
        self._file = self.folder / f"{secrets.token_hex(8)}{ENDING}"

    def _read(self, held: bytes) -> None:
        """Take the records of a file; one that a killed run has left half written ends it."""
        at = 0
        while at + KEY + 4 <= len(held):
            count = int.from_bytes(held[at + KEY : at + KEY + 4], "little")
            begin, end = at + KEY + 4, at + KEY + 4 + 4 * count
            if end > len(held):
                return
            self.rows[held[at : at + KEY]] = np.frombuffer(held, np.float32, count, begin)
            at = end

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """List the places of the rows that are not known."""
        return [place for place, key in enumerate(keys) if key not in self.rows]

    def add(self, keys: Sequence[bytes], scores: torch.Tensor, lengths: Sequence[int]) -> None:
        """Add rows: their scores `[B, T]`, of which the first `lengths` are theirs."""
        found = [np.array(row[:length], np.float32) for row, length in zip(scores.numpy(), lengths, strict=True)]
        self.rows.update(zip(keys, found, strict=True))
        if self.writes:
            with self._file.open("ab") as file:
                file.write(b"".join(key + len(row).to_bytes(4, "little") + row.tobytes() for key, row in zip(keys, found, strict=True)))

    def scores(self, keys: Sequence[bytes], width: int) -> torch.Tensor:
        """Put the scores of known rows together, `[B, width]`, with 0 behind the end of each."""
        found = torch.zeros(len(keys), width)
        for place, key in enumerate(keys):
            row = self.rows[key]
            found[place, : len(row)] = torch.from_numpy(np.array(row))
        return found


def row_keys(columns: Columns) -> list[bytes]:
    """Hash the tokens of each row: its prompt, its response and the mask of what is scored."""
    prompts, prompt_mask, responses, mask = (tensor_of(columns, name) for name in ("prompts", "prompt_mask", "responses", "response_mask"))
    lengths = response_lengths(mask).tolist()
    keys = []
    for row, length in enumerate(lengths):
        parts = (prompts[row][prompt_mask[row]], responses[row, :length], mask[row, :length].to(torch.int64))
        whole = hashlib.sha256()
        for part in parts:
            whole.update(len(part).to_bytes(8, "little") + part.to(torch.int64).numpy().tobytes())
        keys.append(whole.digest())
    return keys


def model_key(path: str, dtype: str, temperature: float) -> str:
    """Hash what a model's scores depend on besides the row: its weights and configuration, its dtype and the temperature."""
    whole = hashlib.sha256(f"{dtype} {temperature!r}".encode())
    for file in sorted(file for file in Path(path).iterdir() if file.name == "config.json" or file.suffix == ".safetensors"):
        with file.open("rb") as data:
            whole.update(file.name.encode() + hashlib.file_digest(data, "sha256").digest())
    return whole.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class CachedLogProbs(LogProbs):
    """Log-probs of a frozen model, of rows that it has not seen before."""

    cache: str = ""

    def check(self, node: Node) -> None:
        super().check(node)
        if Path(self.cache).exists() and not Path(self.cache).is_dir():
            raise DataError(f"node '{node.name}' has cache='{self.cache}', which is a file; give a folder; it is made where there is none")

    def start(self, context: Context) -> Stage:
        folder = Path(self.cache) / model_key(self.model.path, self.model.dtype, self.temperature)
        known = CachedScores(folder, writes=context.rank == 0)
        return lambda step, columns: self.look_up(context, known, columns)

    def look_up(self, context: Context, known: CachedScores, columns: Columns) -> Fired:
        """Compute the rows that are not known, all at once, and put all of them together."""
        keys, mask = row_keys(columns), tensor_of(columns, "response_mask")
        places = known.missing(keys)
        if places:
            rows = {name: tensor_of(columns, name)[places] for name in TOKENS}
            lengths = response_lengths(rows["response_mask"]).tolist()
            computed = context.engine.scores(rows, temperature=self.temperature)
            known.add([keys[place] for place in places], computed, lengths)
        share = 1 - len(places) / max(len(keys), 1)
        return {self.column: known.scores(keys, mask.shape[1])}, {f"{self.column}/cached": share}
