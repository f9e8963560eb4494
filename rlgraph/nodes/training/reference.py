"""The reference: a model without an update. A KL term keeps the policy close to it, or it follows the policy on separate devices."""

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from rlgraph.batching.packing import response_lengths
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.graph.nodes import Feedback, Node, Output, declare
from rlgraph.graph.traits import ModelTraits
from rlgraph.nodes.base import Context, Fired, Stage, list_columns, tensor_of
from rlgraph.nodes.training.policy import LogProbs, sampling_temperature
from rlgraph.nodes.training.trained_model import TOKENS, TrainedModel, beside_tokens, check_scored
from rlgraph.settings import Count, check_arguments, refuse_unknown
from rlgraph.values.lora import LoRA
from rlgraph.values.optimizers import AdamW

# Scores of rows that a frozen model has seen before, kept on disk: the same row is not computed again, in this run or another one.

KEY = 32  # bytes of a row's hash
ENDING = ".scores"


@dataclass
class CachedScores:
    """The scores of rows by the hash of their tokens: scores in the files of a folder, and new scores in a file of this run.

    `folder` belongs to one model, dtype and temperature. `writes`: whether this rank writes. All ranks read before any of them writes, so
    they know the same rows, and compute the others together. A record is the row's hash, the number of its scores, and the scores as
    float32. Raises DataError for a folder that cannot be used.
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
            raise DataError(f"the cache of scores '{self.folder}' cannot be used ({error}); pass a folder that can be written") from None
        self._file = self.folder / f"{secrets.token_hex(8)}{ENDING}"

    def _read(self, held: bytes) -> None:
        """Read the records of a file, up to an incomplete record of a killed run."""
        at = 0
        while at + KEY + 4 <= len(held):
            count = int.from_bytes(held[at + KEY : at + KEY + 4], "little")
            begin, end = at + KEY + 4, at + KEY + 4 + 4 * count
            if end > len(held):
                return
            self.rows[held[at : at + KEY]] = np.frombuffer(held, np.float32, count, begin)
            at = end

    def unknown_rows(self, keys: Sequence[bytes]) -> list[int]:
        """List the places of the unknown rows."""
        return [place for place, key in enumerate(keys) if key not in self.rows]

    def add(self, keys: Sequence[bytes], scores: torch.Tensor, lengths: Sequence[int]) -> None:
        """Add rows: their scores `[B, T]`, of which the first `lengths` count."""
        found = [np.array(row[:length], np.float32) for row, length in zip(scores.numpy(), lengths, strict=True)]
        self.rows.update(zip(keys, found, strict=True))
        if self.writes:
            with self._file.open("ab") as file:
                file.write(b"".join(key + len(row).to_bytes(4, "little") + row.tobytes() for key, row in zip(keys, found, strict=True)))

    def scores(self, keys: Sequence[bytes], width: int) -> torch.Tensor:
        """Combine the scores of known rows, `[B, width]`, with 0 after the end of each."""
        found = torch.zeros(len(keys), width)
        for place, key in enumerate(keys):
            row = self.rows[key]
            found[place, : len(row)] = torch.from_numpy(np.array(row))
        return found


def row_keys(columns: Columns) -> list[bytes]:
    """Hash the tokens of each row: its prompt, its response and the mask of scored tokens."""
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
    """Hash everything besides the row that a model's scores depend on: its weights and configuration, its dtype and the temperature."""
    whole = hashlib.sha256(f"{dtype} {temperature!r}".encode())
    for file in sorted(file for file in Path(path).iterdir() if file.name == "config.json" or file.suffix == ".safetensors"):
        with file.open("rb") as data:
            whole.update(file.name.encode() + hashlib.file_digest(data, "sha256").digest())
    return whole.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class CachedLogProbs(LogProbs):
    """Compute log-probs of a frozen model, for rows that it has not seen before."""

    cache: str = ""

    def check(self, node: Node) -> None:
        super().check(node)
        if Path(self.cache).exists() and not Path(self.cache).is_dir():
            raise DataError(f"node '{node.name}' has cache='{self.cache}', which is a file; pass a folder, which is created if missing")

    def start(self, context: Context) -> Stage:
        folder = Path(self.cache) / model_key(self.model.path, self.model.dtype, self.temperature)
        known = CachedScores(folder, writes=context.rank == 0)
        return lambda step, columns: self.look_up(context, known, columns)

    def look_up(self, context: Context, known: CachedScores, columns: Columns) -> Fired:
        """Compute the unknown rows, all at once, and combine all rows."""
        keys, mask = row_keys(columns), tensor_of(columns, "response_mask")
        places = known.unknown_rows(keys)
        if places:
            rows = {name: tensor_of(columns, name)[places] for name in TOKENS}
            lengths = response_lengths(rows["response_mask"]).tolist()
            computed = context.engine.scores(rows, temperature=self.temperature)
            known.add([keys[place] for place in places], computed, lengths)
        share = 1 - len(places) / max(len(keys), 1)
        return {self.column: known.scores(keys, mask.shape[1])}, {f"{self.column}/cached": share}


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Reference(TrainedModel):
    """A frozen model that computes log-probs, e.g. for a KL penalty or DPO.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> rg.Reference("tiny", pool=rg.Pool("train")).log_probs(rollout).columns
    ('ref_log_probs',)

    `log_probs` uses the weights of the folder. `old_log_probs` uses the weights of a feedback edge; pass the policy's folder then.

    * `max_context`: with the trainer "vllm", the most tokens of prompt and response together. vLLM reserves that many tokens of KV cache.
      None: the model's own limit.
    """

    role: ClassVar[str] = "reference"
    frozen: ClassVar[bool] = True
    optimizer: AdamW = field(default_factory=AdamW, init=False)  # no effect without training, so neither can be set
    recompute: bool = field(default=False, init=False)
    adapter: LoRA | None = field(default=None, init=False)
    train_vision: bool = field(default=False, init=False)
    exact: bool = field(default=False, init=False)
    fused_head: bool | None = field(default=None, init=False)
    offload: Literal["moments", "never"] | None = field(default=None, init=False)
    load_balance: float = field(default=0.0, init=False)
    max_context: Count | None = None

    @property
    def traits(self) -> ModelTraits:
        return replace(super().traits, max_context=self.max_context)

    @check_arguments()
    def log_probs(self, *inputs: Output, cache: str | Path | None = None, name: str = "ref_log_probs") -> Output:
        """Declare `ref_log_probs` [B, T]: the log-probs of the responses under the weights of the folder.

        * `inputs`: outputs with the prompts and the responses.
        * `cache`: a folder that stores the log-probs of each row across runs, so that a row with the same tokens is not computed again. Its
          key is the hash of weights, `dtype`, temperature and tokens. A cached row keeps the rounding of the batch in which it was
          computed, so runs with the same data order are bit-identical with and without a cache. Use it for examples and pairs; a rollout
          rarely returns the same row twice. Metric: `ref_log_probs/cached`, the share of rows found in the cache.
        * `name`: the node's name in plans and errors.

        Raises GraphError for a cache with `dtype="auto"`, which may be another dtype on the next machine.
        """
        temperature = sampling_temperature(inputs)
        check_scored(name, self, temperature)
        operation = LogProbs(self, "ref_log_probs", temperature)
        if cache is not None:
            if "images" in list_columns(inputs):
                raise GraphError(f"node '{name}' has a cache, and gets images, which its rows are not told apart by; leave out cache")
            if self.dtype == "auto":
                raise GraphError(
                    f"node '{name}' has cache={show_value(str(cache))} of a reference with dtype='auto', which may be another one "
                    "on the next "
                    "machine; pass dtype='bfloat16' or 'float32'"
                )
            operation = CachedLogProbs(self, "ref_log_probs", temperature, cache=os.path.abspath(cache))
        reads = (*TOKENS, *beside_tokens(name, self, inputs))
        return Output(declare(name, operation, inputs, reads=reads, writes=("ref_log_probs",), model=self))

    @check_arguments()
    def old_log_probs(self, *inputs: Output, weights: Feedback, name: str = "old_log_probs") -> Output:
        """Declare `old_log_probs` [B, T] on this pool instead of the policy's, under the weights of a feedback edge.

        * `inputs`: outputs with the prompts and the responses.
        * `weights`: the edge. With the rollout's own edge the column holds the trainer's log-probs under the version that wrote the
          responses, and computing it overlaps with both rollout and update. With an edge of `depth=0` it uses the weights at the start
          of the update, like `policy.log_probs`, and the update waits for it.
        * `name`: the node's name in plans and errors.

        Raises GraphError for anything but a feedback edge, for an edge with `latest=True`, and for the edge of a rollout whose
        responses mix versions (`interrupt` or `continuous`).
        """
        if self.spec.only_scores:
            raise GraphError(
                f"node '{name}' is of a model with trainer='{self.spec.name}', which keeps the weights of its folder; leave out trainer"
            )
        if weights.latest:
            raise GraphError(
                f"node '{name}' follows feedback '{weights.name}', which uses the newest version: rollout and log-probs would "
                "use different ones; use an edge without latest=True"
            )
        mixed = next((o.node.name for o in inputs if _mixes_versions(o, weights)), None)
        if mixed is not None:
            raise GraphError(
                f"node '{name}' follows the edge '{weights.name}' of '{mixed}', whose responses run through several versions (interrupt or "
                "continuous): no single version wrote them; use a separate edge with depth=0, or policy.log_probs(rollout)"
            )
        operation = LogProbs(self, "old_log_probs", sampling_temperature(inputs))
        reads = (*TOKENS, *beside_tokens(name, self, inputs))
        return Output(declare(name, operation, inputs, reads=reads, writes=("old_log_probs",), model=self, feedback=weights))


def _mixes_versions(output: Output, weights: Feedback) -> bool:
    if not isinstance(output, Output) or output.node.feedback is not weights:
        return False
    traits = output.node.traits
    return traits.interrupt is not None or traits.continuous
