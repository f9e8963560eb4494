"""A folder of checkpoints: find and check the newest complete one, publish a new one, delete the oldest; and the trained models.

A checkpoint is written into a folder with a hidden name. One rename publishes it once every worker's shard, the plan and the manifest with
the sizes and checksums of all files are on the disk. So an incomplete checkpoint is never used.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from rlgraph.analysis.words import graph_settings
from rlgraph.engines.hf.export import AdapterForm
from rlgraph.engines.hf.model_files import revision_of
from rlgraph.engines.lora import SavedAdapter
from rlgraph.errors import CheckpointError, ExportError, show_value
from rlgraph.graph.graph import Graph
from rlgraph.nodes.training.trained_model import TrainedModel
from rlgraph.plan.checkpoint_cut import lookaheads
from rlgraph.plan.plan import Plan
from rlgraph.runtime.checkpoint.worker_snapshot import unfinished_name
from rlgraph.runtime.messages import CheckpointShard, NotSaved, Saved
from rlgraph.runtime.worker.spec import Resume, Start

# The trained models of a graph, as an export and a checkpoint name them.


class TrainedEntry(msgspec.Struct, frozen=True):
    """A trained model: its name in the plan, its original folder, what it scores, its trainer, and its adapter if only that is trained."""

    name: str
    path: str
    scores: Literal["log_probs", "values"]
    trainer: str
    adapter: SavedAdapter | None = None


def trained_models(graph: Graph, plan: Plan) -> tuple[TrainedEntry, ...]:
    """List the models that the graph trains and that have a Hugging Face folder, in the order of their updates."""
    found: dict[str, TrainedEntry] = {}
    for node in graph.nodes:
        model = node.model
        if node.traits.work == "train" and isinstance(model, TrainedModel):
            name = plan.node(node.name).model or node.name
            found.setdefault(name, TrainedEntry(name, model.path, model.scores, model.spec.name, _adapter(model)))
    return tuple(found.values())


def _adapter(model: TrainedModel) -> SavedAdapter | None:
    return None if model.adapter is None else SavedAdapter.of(model.adapter)


def check_apart(model: TrainedEntry, adapter: AdapterForm, where: str) -> None:
    """Raise ExportError for a model without an adapter, or a critic, whose adapter is to be exported separately."""
    if model.adapter is not None and model.scores == "values":
        raise ExportError(f"{where}: '{model.name}' is a critic with an adapter, which only checkpoints hold; export the policy")
    if adapter == "apart" and model.adapter is None:
        raise ExportError(f"{where}: '{model.name}' trained no adapter that could be separate; leave out adapter='apart'")


def choose_model(models: Sequence[TrainedEntry], policy: str | None, where: str) -> TrainedEntry:
    """Choose the model to export: the model of this name, or the graph's only policy.

    Raises ExportError if there is none, or several.
    """
    names: Mapping[str, TrainedEntry] = {model.name: model for model in models}
    if not names:
        raise ExportError(f"{where}: the graph trains no model that has a Hugging Face folder; there is nothing to export")
    if policy is not None and policy not in names:
        raise ExportError(f"{where} has policy={show_value(policy)}; the trained models are {list(names)}: name one of them")
    policies = [model for model in models if model.scores == "log_probs"]
    only = policies if len(policies) == 1 else list(models)
    if policy is None and len(only) > 1:
        raise ExportError(f"{where}: the graph trains {list(names)}; say which one: policy={next(iter(names))!r}")
    return names[policy] if policy is not None else only[0]


# Whether a graph can resume a checkpoint depends on its nodes, columns and depths, not on learning rates, pools or ranks.


def fingerprint(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Collect, as plain values, what a checkpoint and the graph that resumes from it must have in common."""
    nodes = {n.name: {"work": n.work, "reads": list(n.reads), "writes": list(n.writes), "rows": n.rows} for n in plan.nodes}
    loops = {p.name: {"writer": p.writer, "readers": list(p.readers), "depth": p.depth, "freshest": p.latest} for p in plan.loops}
    loops |= {
        c.name: {"writer": c.writer, "readers": list(c.readers), "depth": c.credits // c.chunks - 1, "columns": list(c.columns)}
        for c in plan.channels
        if c.kind == "earlier"
    }
    found = {"name": graph.name, "nodes": nodes, "feedback": loops}
    named = ((plan.node(node.name).model, node.model.path) for node in graph.nodes if node.model is not None)
    revisions = {str(name): "@".join(revision) for name, path in named if (revision := revision_of(path)) is not None}
    return found | ({"revisions": revisions} if revisions else {})


def difference(saved: Any, now: Any, where: str = "") -> str:
    """Describe the first place at which two plain values differ; empty if they are equal."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*saved, *now)):
            place = f"{where} '{key}'".strip()
            if key not in saved or key not in now:
                return f"{place} is {'new' if key in now else 'missing now'}"
            if found := difference(saved[key], now[key], place):
                return found
        return ""
    if isinstance(saved, Sequence) and isinstance(now, Sequence) and not isinstance(saved, str):
        return "" if list(saved) == list(now) else f"{where} was {list(saved)} and is {list(now)}"
    return "" if saved == now else f"{where} was {show_value(saved)} and is {show_value(now)}"


def lock_file(path: Path) -> int:
    """Lock a file while this process lives, and create it if it is missing. Raises BlockingIOError if another process or job holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def unlock_file(handle: int) -> None:
    """Release a lock, also if a fork of this process has its handle too."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


FORMAT = 1
EXPORTS = "exports"  # the folder of exports, next to the checkpoints


@dataclass(frozen=True)
class Recovery:
    """The checkpoint settings of a launch: the folder, the steps between two, how many are kept, and how often a job may restart."""

    folder: Path
    every: int
    keep: int
    restarts: int = 0
    fresh: bool = False
    export_every: int | None = None

    def export(self, step: int) -> Path:
        """The folder of the export after `step` steps."""
        return self.folder / EXPORTS / _name(step)


@dataclass
class Checkpoints:
    """The checkpoints of one run. Only one job at a time writes into a folder.

    Raises CheckpointError for a folder that cannot be written or belongs to another job, and if the newest checkpoint is incomplete or
    belongs to another graph.
    """

    graph: Graph
    plan: Plan
    recovery: Recovery
    id: str = ""
    newest: int = 0  # step of the newest complete checkpoint, 0 if there is none
    tried: int = 0  # step of the newest checkpoint that every worker has written, or could not write
    set_aside: tuple[int, ...] = ()
    troubles: list[str] = field(default_factory=list)  # checkpoints that could not be written, as text that is not yet reported
    shards: dict[int, dict[str, CheckpointShard]] = field(default_factory=dict)
    failed: dict[int, set[str]] = field(default_factory=dict)  # the workers that could not write their shard
    figures: dict[int, Mapping[str, float]] = field(default_factory=dict)  # metrics of the steps that a model card shows
    _lock: int = -1

    def open(self) -> None:
        """Open the folder: lock it, remove what a killed job left incomplete, and find the newest checkpoint."""
        lookaheads(self.plan)  # refused here, not in the middle of a run
        try:
            self._take_folder()
            if self.recovery.fresh:
                self._move_earlier_runs()
            steps = self._steps()
            if steps:
                self.newest = steps[-1]
                self._check(self._path(self.newest))
        except BaseException:
            self.close()
            raise

    def _take_folder(self) -> None:
        folder = self.recovery.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(folder / "lock")
        except BlockingIOError:
            raise CheckpointError(f"checkpoint folder '{folder}' is in use by another job; one folder belongs to one run") from None
        except OSError as error:
            raise CheckpointError(f"checkpoint folder '{folder}' cannot be written ({error}); pass a writable one") from None

    def close(self) -> None:
        """Release the folder."""
        if self._lock >= 0:
            unlock_file(self._lock)
            self._lock = -1

    def start(self, probe: tuple[str, int] | None = None) -> Start:
        """Begin a session: remove what an earlier session left incomplete, and return where it starts and which prompts it probes."""
        self.id = secrets.token_hex(4)
        if self._lock >= 0:  # workers look for it, to see that their folder is this one
            os.pwrite(self._lock, self.id.encode(), 0)
            os.fsync(self._lock)
        self.shards.clear()
        self.failed.clear()
        self.tried = self.newest
        for left in self.recovery.folder.glob(".part-*"):
            shutil.rmtree(left, ignore_errors=True)
        resume = Resume(str(self._path(self.newest)), self.newest) if self.newest else None
        return Start(resume, str(self.recovery.folder.absolute()), self.id, self.recovery.every, self.set_aside, probe)

    def hear(self, news: Saved | NotSaved) -> None:
        """Record that a worker's shard of a checkpoint is on the disk, or could not be written."""
        if isinstance(news, Saved):
            self.shards.setdefault(news.step, {})[news.shard.worker] = news.shard
        else:
            self.failed.setdefault(news.step, set()).add(news.worker)
            self.troubles.append(
                f"the checkpoint of step {news.step} could not be written by worker '{news.worker}'{news.where}: {news.message}"
            )

    def has_all_answers(self, step: int) -> bool:
        """Whether every worker has reported that its shard is on the disk, or could not be written."""
        return len(self.shards.get(step, {})) + len(self.failed.get(step, ())) == len(self.plan.workers)

    def list_complete(self, handed: int) -> list[int]:
        """List the checkpoints that every worker has finished, without steps beyond the `handed` steps that the user has seen."""
        return sorted(step for step in {*self.shards, *self.failed} if step <= handed and self.has_all_answers(step))

    def commit(self, handed: int) -> list[int]:
        """Finish the checkpoints whose shards are all written, without steps beyond the `handed` steps that the user has seen."""
        done = []
        for step in self.list_complete(handed):
            self.tried = step
            try:
                if step not in self.failed:
                    self._complete(step, self.shards[step])
                    self.newest = step
                    done.append(step)
            except OSError as error:
                self.troubles.append(f"the checkpoint of step {step} could not be completed: {type(error).__name__}: {error}")
            finally:
                self.shards.pop(step, None)
                self.failed.pop(step, None)
                shutil.rmtree(self.recovery.folder / unfinished_name(self.id, step), ignore_errors=True)
        for old in self._steps()[: -self.recovery.keep] if done else ():
            shutil.rmtree(self._path(old), ignore_errors=True)
        return done

    def _complete(self, step: int, shards: Mapping[str, CheckpointShard]) -> None:
        unfinished = self.recovery.folder / unfinished_name(self.id, step)
        plan = self.plan.to_json()
        manifest = {
            "format": FORMAT,
            "plan": hashlib.sha256(plan.encode()).hexdigest(),
            "step": step,
            "weight_version": step,
            "metrics_lines": step,
            "graph": fingerprint(self.graph, self.plan),
            "cursors": self._cursors(step),
            "set_aside": list(self.set_aside),
            "every": self.recovery.every,
            "settings": graph_settings(self.graph, self.plan),
            "folder": str(Path.cwd()),  # relative paths of models start here
            "models": msgspec.to_builtins(trained_models(self.graph, self.plan)),
            "figures": {"first": self.figures.get(0, {}), "last": self.figures.get(step - 1, {})},
            "parts": [msgspec.to_builtins(shards[worker.name]) for worker in self.plan.workers],
        }
        _write(unfinished / "plan.json", plan)
        text = json.dumps(manifest, indent=1)
        _write(unfinished / "manifest.json", text)
        _write(unfinished / "manifest.sha256", hashlib.sha256(text.encode()).hexdigest())
        sync(unfinished)
        unfinished.rename(self._path(step))
        sync(self.recovery.folder)

    def _check(self, folder: Path) -> None:
        """Raise CheckpointError unless the checkpoint is complete and belongs to this graph."""
        manifest = checked_manifest(folder, f"; delete '{folder}' to resume from the one before, or launch with fresh=True")
        cursors, saved = self._cursors(self.newest), manifest["cursors"]
        cursors = {name: cursor for name, cursor in cursors.items() if name in saved or "next" in cursor}  # evaluations had none before
        for name in cursors.keys() & saved.keys():  # earlier versions wrote no digest of the rows
            cursors[name] = {key: value for key, value in cursors[name].items() if key != "digest" or key in saved[name]}
        found = difference(manifest["graph"], fingerprint(self.graph, self.plan))
        both = [(name, saved[name], cursors[name]) for name in sorted(cursors.keys() & saved.keys())]
        changed = [name for name, old, new in both if old != new and {**old, "digest": new.get("digest")} == new]
        if changed and not found:
            raise CheckpointError(
                f"checkpoint '{folder}' was made with other rows of {changed}, or the same in another order; pass the same data, another "
                "folder, or launch with fresh=True"
            )
        if found := found or difference(saved, cursors):
            raise CheckpointError(f"checkpoint '{folder}' is of another graph: {found}; pass another folder, or launch with fresh=True")
        self.set_aside = tuple(manifest["set_aside"])
        self.figures = {0: manifest.get("figures", {}).get("first", {})}

    def _cursors(self, step: int) -> dict[str, Mapping[str, Any]]:
        """Collect the position of each source of data after `step` steps."""
        found = {node.name: node.operation.cursor(step) for node in self.graph.nodes}
        return {name: cursor for name, cursor in found.items() if cursor is not None}

    def _move_earlier_runs(self) -> None:
        """Move the checkpoints of earlier runs aside; nothing is deleted."""
        steps, exports = self._steps(), self.recovery.folder / EXPORTS
        if steps or exports.exists():
            names = (self.recovery.folder / f"earlier-{number}" for number in range(1, 10_000))
            earlier = next(path for path in names if not path.exists())
            earlier.mkdir()
            for step in steps:
                self._path(step).rename(earlier / self._path(step).name)
            if exports.exists():
                exports.rename(earlier / EXPORTS)

    def note(self, index: int, metrics: Mapping[str, float]) -> None:
        """Remember the metrics of a step for a model card: of the first step, and of steps that are not yet saved."""
        self.figures = {step: found for step, found in self.figures.items() if step in (0, index) or step >= self.newest - 1}
        self.figures[index] = metrics

    def _path(self, step: int) -> Path:
        return self.recovery.folder / _name(step)

    def _steps(self) -> list[int]:
        return sorted(checkpoint_steps(self.recovery.folder))


def checked_manifest(folder: Path, fix: str = "; export an older one") -> dict[str, Any]:
    """Read the manifest of a checkpoint, and compare all files with it. Raises CheckpointError with a message that ends with `fix`."""
    try:
        text = (folder / "manifest.json").read_text()
        if hashlib.sha256(text.encode()).hexdigest() != (folder / "manifest.sha256").read_text():
            raise CheckpointError(f"checkpoint '{folder}': manifest.json was changed after it was written{fix}")
        manifest: dict[str, Any] = json.loads(text)
        if "plan" in manifest and hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest() != manifest["plan"]:
            raise CheckpointError(f"checkpoint '{folder}': plan.json was changed after it was written{fix}")
        for written in (w for shard in msgspec.convert(manifest["parts"], list[CheckpointShard]) for w in shard.written):
            with (folder / written.path).open("rb") as data:
                found = hashlib.file_digest(data, "sha256").hexdigest()
            if found != written.sha256:
                raise CheckpointError(f"checkpoint '{folder}': '{written.path}' was changed after it was written{fix}")
    except (OSError, ValueError, KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(f"checkpoint '{folder}' is incomplete ({error}){fix}") from None
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"checkpoint '{folder}' has format {manifest['format']}, this version reads {FORMAT}{fix}")
    return manifest


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """Find the checkpoints in a folder, by their steps."""
    return {int(path.name.removeprefix("step-")): path for path in folder.glob("step-" + "[0-9]" * 8)}


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _write(file: Path, text: str) -> None:
    with file.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
