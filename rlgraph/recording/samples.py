"""Record samples of a run: what the policy was asked, what it wrote, and how that was rewarded; and profiles of some steps."""

import json
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import numpy as np

from rlgraph.analysis.samples import FIELDS, FOLDER, LINES, PROFILES_FOLDER, TABLE, Sample, parquet, read_file, sample_files
from rlgraph.columns import FINISH_REASONS
from rlgraph.engines.hf.model_files import load_tokenizer
from rlgraph.errors import PlanError, choices
from rlgraph.graph.graph import Graph
from rlgraph.plan.plan import Plan
from rlgraph.runtime.messages import Cells, ProfileRequest, SampledRows, SampleSource, sample_sources
from rlgraph.settings import Count, Fraction, Name, Natural, Range, check, refuse_unknown

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

# Write samples into rotated files: the newest as JSON lines, so that a killed run loses none, older ones in the format asked for.

TEXTS = ("kind", "rollout", "prompt", "response", "finish")
REALS = ("reward", "advantage", "log_prob_diff")
REAL_LISTS = ("token_advantages", "token_log_probs", "token_log_prob_diffs")


class SampleFiles:
    """The files of a run's samples. Each holds whole steps, in their order; a file that has grown to `file_bytes` is followed by another.

    Opened for a run that resumed after `finished` steps, it keeps the samples of those and drops the rest.
    """

    def __init__(self, folder: Path, finished: int, *, table: bool, file_bytes: int) -> None:
        self.folder, self.table, self.file_bytes = folder / FOLDER, table, file_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob("*.part"):
            unfinished.unlink()
        for path in sample_files(folder):
            _keep_steps(path, finished)
        self._number = max((int(path.stem.rpartition("-")[2]) + 1 for path in sample_files(folder)), default=0)
        self._lines: TextIO | None = None

    def write(self, samples: Sequence[Sample]) -> None:
        """Append the samples of one step; they are in the file when this returns."""
        if self._lines is None:
            self._lines = (self.folder / f"samples-{self._number:05d}{LINES}").open("w", encoding="utf-8")
        self._lines.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        self._lines.flush()
        if self._lines.tell() >= self.file_bytes:
            self.close()

    def close(self) -> None:
        """End the newest file, as a parquet file if that is the format."""
        if self._lines is None:
            return
        path = Path(self._lines.name)
        self._lines.close()
        self._lines, self._number = None, self._number + 1
        if self.table:
            _write_table(list(read_file(path)), path.with_suffix(TABLE))
            path.unlink()


def _keep_steps(path: Path, finished: int) -> None:
    """Drop the samples of later steps from a file, and the file if none are left."""
    twin = path.with_suffix(TABLE)
    if path.suffix == LINES and twin.exists():  # killed after the table was whole
        path.unlink()
        return
    samples = list(read_file(path)) if finished else []
    kept = [sample for sample in samples if sample["step"] < finished]
    if not kept:
        path.unlink()
    elif len(kept) < len(samples) or path.suffix == LINES:
        if path.suffix == TABLE:
            _write_table(kept, path)
        else:
            part = path.with_suffix(".part")
            part.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept), encoding="utf-8")
            part.replace(path)


def _write_table(samples: Sequence[Sample], path: Path) -> None:
    """Write a parquet file whose columns have the same types in every file; `columns` is JSON, since its keys differ from run to run."""
    writer = parquet()
    import pyarrow

    rows = [{**sample, "columns": json.dumps(sample["columns"])} for sample in samples]
    schema = pyarrow.schema([(name, _type_of(name, pyarrow)) for name in FIELDS])
    part = path.with_suffix(".part")
    writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema), part)
    part.replace(path)


def _type_of(name: str, pyarrow: Any) -> Any:
    if name in (*TEXTS, "columns"):
        return pyarrow.string()
    if name in ("token_texts", "images"):
        return pyarrow.list_(pyarrow.string())
    if name in REALS:
        return pyarrow.float64()
    if name in REAL_LISTS:
        return pyarrow.list_(pyarrow.float32())
    return pyarrow.list_(pyarrow.int32()) if name.startswith("token_") else pyarrow.int64()


# Join the rows that workers sent to one record for each response, and decode its tokens.

DIGITS = 5  # of a number of each token
BROKEN = "\ufffd"  # what a decoder gives for part of a character
OWN = (  # columns with a field of their own
    *("prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "weight_version", "finish_reasons", "group_ids"),
    *("old_log_probs", "advantages", "loss_mask", "rewards", "token_rewards", "prompt_texts", "prompt_ids", "images", "image_mask"),
)


class TokenTexts:
    """The texts of token ids, one for each token; it remembers what it has decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]  # some decoders drop the space before a first token

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to a text, special tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Give each token its text. A character of several tokens stands at the first of them, and the others are empty."""
        found = [self._text(token) for token in ids]
        place = 0
        while place < len(found):
            end = place
            while end < len(found) and (BROKEN in found[end] or (end > place and not found[end])):
                end += 1
            if end > place:
                found[place:end] = [self.decode(ids[place:end]), *[""] * (end - place - 1)]
            place = end + 1
        return found

    def _text(self, token: int) -> str:
        if token not in self._texts:
            before = self.decode(self._anchor)
            self._texts[token] = self.decode([*self._anchor, token])[len(before) :]
        return self._texts[token]


def records(
    step: int, messages: Sequence[SampledRows], sources: Sequence[SampleSource], decoders: Mapping[str, TokenTexts]
) -> list[Sample]:
    """Make a record for each response of a step whose rows are there, in the order of the batch."""
    order = {(source.node, source.rollout): (place, source.repeat) for place, source in enumerate(sources)}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    nodes = {source.rollout for source in sources}
    kinds = {source.rollout: source.kind for source in sources}
    by_rollout = sorted(messages, key=lambda rows: order[rows.node, rows.rollout][0])
    for rows in (rows for rows in by_rollout if rows.node in nodes):
        for row, values in zip(rows.rows, _rows_of(rows.columns), strict=True):
            found.setdefault((rows.rollout, row), {}).update(values)
    for rows in (rows for rows in by_rollout if rows.node not in nodes):
        repeat = order[rows.node, rows.rollout][1]
        for number, values in zip(rows.rows, _rows_of(rows.columns), strict=True):
            for row in range(number * repeat, (number + 1) * repeat):
                if (rows.rollout, row) in found:
                    _add(found[rows.rollout, row], rows.node, values)
    return [
        {"step": step, "kind": kinds[rollout], **_record(rollout, row, found[rollout, row], decoders.get(rollout))}
        for rollout, row in sorted(found)
    ]


def _add(record: dict[str, Any], node: str, values: Mapping[str, Any]) -> None:
    """Add a node's values; one that another node wrote before it is kept under that node's name."""
    writers = record.setdefault("", {})
    for name, value in values.items():
        if name in record and name in writers:
            record[f"{writers[name]}/{name}"] = record[name]
        record[name], writers[name] = value, node


def _rows_of(columns: Mapping[str, Cells]) -> Iterator[dict[str, Any]]:
    """Yield the values of each row."""
    arrays = {
        name: cells.text if cells.dtype == "text" else np.frombuffer(cells.data, cells.dtype).reshape(cells.shape)
        for name, cells in columns.items()
    }
    count = len(next(iter(arrays.values()), ()))
    for row in range(count):
        yield {name: array[row] for name, array in arrays.items()}


def _record(rollout: str, row: int, values: Mapping[str, Any], decoder: TokenTexts | None) -> Sample:
    mask, tokens = values["response_mask"], values.get("responses")
    written = mask if tokens is None else mask | (tokens != 0)
    length = int(np.flatnonzero(written)[-1]) + 1 if written.any() else 0
    policy = mask[:length]
    ids = [] if tokens is None else tokens[:length].tolist()
    prompt_mask = values.get("prompt_mask")
    prompt_ids = values["prompts"][prompt_mask].tolist() if prompt_mask is not None else []
    images = json.loads(values.get("images", "[]"))
    asked = _without_repeats(prompt_ids) if images else prompt_ids
    repeats = _flag_repeats(ids, values.get("image_mask"))
    versions = values["weight_version"][:length] if "weight_version" in values else np.zeros(0, np.int32)
    advantages = _tokens(values, "advantages", length)
    sampled, trained = _tokens(values, "rollout_log_probs", length), _tokens(values, "old_log_probs", length)
    diffs = [new - old for new, old in zip(trained, sampled, strict=True)] if trained and sampled else []
    others = {name: _plain(value) for name, value in values.items() if name and name not in OWN}
    record = {
        "rollout": rollout,
        "row": row,
        "group": int(values["group_ids"]) if "group_ids" in values else row,
        "prompt": decoder.decode(asked) if decoder and asked else str(values.get("prompt_texts", "")),
        "images": images,
        "response": decoder.decode([token for token, again in zip(ids, repeats, strict=True) if not again]) if decoder else "",
        "reward": _plain(values["rewards"]) if "rewards" in values else None,
        "advantage": _mean(advantages, policy),
        "finish": FINISH_REASONS[int(values["finish_reasons"])] if "finish_reasons" in values else "",
        "prompt_tokens": len(prompt_ids),
        "response_tokens": int(policy.sum()),
        "version_min": int(versions[policy].min()) if len(versions) and policy.any() else 0,
        "version_max": int(versions[policy].max()) if len(versions) and policy.any() else 0,
        "log_prob_diff": _mean(diffs, policy),
        "columns": others,
        "token_texts": ["" if again else text for text, again in zip(decoder.texts(ids), repeats, strict=True)] if decoder else [],
        "token_ids": ids,
        "token_policy": policy.astype(int).tolist(),
        "token_trained": values["loss_mask"][:length].astype(int).tolist() if "loss_mask" in values else [],
        "token_rewards": _short(_tokens(values, "token_rewards", length)),
        "token_advantages": _short(advantages),
        "token_versions": versions.tolist(),
        "token_log_probs": _short(sampled),
        "token_log_prob_diffs": _short(diffs),
    }
    assert record.keys() == FIELDS.keys() - {"step", "kind"}
    return record


def _without_repeats(ids: Sequence[int]) -> list[int]:
    """Leave one token of each run of more than three equal ones: the tokens of an image."""
    runs = [(token, len(list(run))) for token, run in groupby(ids)]
    return [token for token, length in runs for _ in range(length if length <= 3 else 1)]


def _flag_repeats(ids: Sequence[int], shown: Any) -> list[bool]:
    """Flag the tokens of images that are equal to the token before."""
    return [place > 0 and token == ids[place - 1] and shown is not None and bool(shown[place]) for place, token in enumerate(ids)]


def _tokens(values: Mapping[str, Any], name: str, length: int) -> list[float]:
    column = values.get(name)
    return [] if column is None or len(column) < length else column[:length].tolist()


def _mean(numbers: Sequence[float], policy: Any) -> float | None:
    return _plain(float(np.asarray(numbers)[policy].mean())) if len(numbers) and policy.any() else None


def _short(numbers: Sequence[float]) -> list[float | None]:
    return [float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None for number in numbers]


def _plain(value: Any) -> Any:
    """Convert a number of numpy to Python's; JSON has no NaN, so one that is not finite becomes None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


WAITING = 8  # steps whose samples may wait to be decoded and written before the loop over the steps waits


@refuse_unknown
@dataclass(frozen=True)
class Samples:
    """The samples of each step's responses that `rg.record` writes.

    >>> import rlgraph as rg
    >>> rg.runs.Samples(share=0.1, most=64)
    Samples(share=0.1, most=64, seed=0, format="jsonl", file_bytes=67108864)

    They go to `samples/` of the run's folder. `rlgraph.analysis.samples.FIELDS` lists the fields of a record.

    * `share`: the share of each step's responses; at least one response per step, unless it is 0.
    * `most`: the most responses per step; None: no limit.
    * `seed`: the seed of the choice.
    * `format`: "jsonl", or "parquet", which needs the extra `data` (pyarrow).
    * `file_bytes`: the approximate size of a file.

    Raises PlanError for a share outside of 0 to 1, and for parquet without pyarrow.
    """

    share: Fraction = 1.0
    most: Count | None = None
    seed: Natural = 0
    format: Literal["jsonl", "parquet"] = "jsonl"
    file_bytes: Annotated[int, Range(least=1, rule="a whole number of bytes, at least 1: 1 << 26 is usual")] = 1 << 26

    def __post_init__(self) -> None:
        check(self, PlanError)
        if self.format == "parquet":
            parquet()

    def __repr__(self) -> str:
        values = f"share={self.share:g}, most={self.most}, seed={self.seed}"
        return f'Samples({values}, format="{self.format}", file_bytes={self.file_bytes})'


class SampleRecorder:
    """Decodes and writes the samples of a job on a thread. What goes wrong there is said once, and the run goes on without samples."""

    def __init__(self, job: "Job", folder: Path, samples: Samples, heard: Callable[[int, Sequence[Sample]], None]) -> None:
        plan: Plan = job.plan
        assert isinstance(plan.source, Graph)
        self._graph, self._sources, self._heard = plan.source, sample_sources(plan.source), heard
        self._files = SampleFiles(folder, job.finished_steps, table=samples.format == "parquet", file_bytes=samples.file_bytes)
        self._waiting: queue.Queue[tuple[int, Sequence[SampledRows]] | None] = queue.Queue(WAITING)
        self._failed, self._notice = False, job.notice
        job.recorder.request_samples(samples.share, samples.most, samples.seed)
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def take(self, step: int, rows: Sequence[SampledRows]) -> None:
        """Take the rows of a step, to be decoded and written; none where no worker has sent any."""
        self._waiting.put((step, rows))

    def flush(self) -> None:
        """Wait until the samples of all steps taken so far are in their files."""
        self._waiting.join()

    def close(self) -> None:
        """Write what is left, and end the newest file."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        decoders: dict[str, TokenTexts] | None = None
        while True:
            taken = self._waiting.get()
            try:
                if taken is None:
                    self._files.close()
                    return
                samples: Sequence[Sample] = ()
                try:
                    if taken[1] and not self._failed:
                        decoders = decoders if decoders is not None else self._decoders()
                        samples = records(*taken, self._sources, decoders)
                        self._files.write(samples)
                finally:
                    self._heard(taken[0], samples)
            except Exception as error:  # noqa: BLE001 (the outer edge of a thread: training does not end for want of samples)
                self._failed = True
                self._notice(f"no more samples are recorded: {type(error).__name__}: {error}")
            finally:
                self._waiting.task_done()

    def _decoders(self) -> dict[str, TokenTexts]:
        """Load the tokenizer of each rollout's model; a model without one has samples without texts."""
        found: dict[str, TokenTexts] = {}
        by_path: dict[str, TokenTexts] = {}
        for rollout in {source.rollout for source in self._sources}:
            node = self._graph.node(rollout)
            if node.model is None or "responses" not in node.writes:
                continue
            path = node.model.path
            if path not in by_path:
                by_path[path] = TokenTexts(load_tokenizer(path))
            found[rollout] = by_path[path]
        return found


# The setting for profiles of some steps of some workers.

StepRange = tuple[Natural, Natural]
_asked: "list[Profile]" = []  # by the command line, for the first run that this program records


@refuse_unknown
@dataclass(frozen=True)
class Profile:
    """Choose the steps and workers that `rg.record(…, profile=)` profiles with torch.profiler: steps `first` to `last`, both included.

    >>> import rlgraph as rg
    >>> rg.planning.Profile(steps=(3, 5), workers="policy")  # for rg.record(job, 100, "runs/math", profile=…)
    Profile(steps=(3, 5), workers='policy', memory=None, stacks=False, shapes=False)

    The files go to `profiles/` of the run's folder, named by worker and steps, and the report links them: a trace, a table of operators,
    and for workers with GPUs the history of CUDA's memory. Profiled steps are slower.

    * `steps`: the first and the last step.
    * `workers`: names of workers, models or nodes; None: all workers.
    * `memory`: True requires the history of CUDA's memory, False leaves it out. None: on GPUs.
    * `stacks`: adds Python stacks to the trace, which make it larger.
    * `shapes`: adds tensor shapes to the trace, which make it larger.

    Raises PlanError for steps out of order, and from `rg.record` for an unknown worker, steps that the run does not reach, and
    `memory=True` if no worker has a GPU.
    """

    steps: StepRange | Annotated[int, Range(least=0)]
    workers: Name | tuple[Name, ...] | None = None
    memory: bool | None = None
    stacks: bool = False
    shapes: bool = False

    def __post_init__(self) -> None:
        check(self, PlanError)
        first, last = self.range
        if first > last:
            raise PlanError(f"Profile(steps=({first}, {last})): the first step comes after the last; pass them in order, e.g. (3, 5)")

    @property
    def range(self) -> tuple[int, int]:
        """The first and the last step."""
        return (self.steps, self.steps) if isinstance(self.steps, int) else self.steps

    def request(self, plan: Plan, steps: int, folder: Path) -> ProfileRequest:
        """Make the request that is sent to the workers. Raises PlanError for one without effect."""
        first, last = self.range
        if last >= steps:
            raise PlanError(f"Profile(steps={self.steps}): the run has {steps} steps, 0 to {steps - 1}; profile some of these")
        wanted = (self.workers,) if isinstance(self.workers, str) else self.workers
        for name in wanted or ():
            if not any(name in (worker.name, worker.model, *worker.nodes) for worker in plan.workers):
                known = [worker.name for worker in plan.workers]
                raise PlanError(f"Profile(workers={self.workers!r}): there is no worker '{name}'; {choices(name, known)}")
        chosen = [
            worker for worker in plan.workers if wanted is None or {*wanted} & {worker.name, worker.model or worker.name, *worker.nodes}
        ]
        names = [worker.name for worker in chosen]
        if self.memory and not any(worker.gpus for worker in chosen):
            raise PlanError(f"Profile(memory=True): none of the workers {names} has a GPU; only CUDA's memory has a history: leave it out")
        target = str((folder / PROFILES_FOLDER).absolute())
        return ProfileRequest(first, last, names, target, memory=self.memory is not False, stacks=self.stacks, shapes=self.shapes)


def ask(profile: Profile) -> None:
    """Have the first run that this program records write a profile, in place of what its own call says."""
    _asked.append(profile)


def take_request() -> Profile | None:
    """Take the profile that was asked for; None if there is none, or a run has taken it."""
    return _asked.pop() if _asked else None
