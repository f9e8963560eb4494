"""A worker's shard of a checkpoint: copied between two firings, written while the run continues, and read back at a start."""

import hashlib
import io
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from rlgraph.columns import Column, Columns, concat_rows, rows_of_rank
from rlgraph.errors import CheckpointError
from rlgraph.graph.traits import Stateful
from rlgraph.runtime.measure import average_metrics
from rlgraph.runtime.messages import CheckpointShard, NotSaved, SampledRows, Saved, Written
from rlgraph.runtime.worker.spec import Resume, Saving, file_name

if TYPE_CHECKING:
    from rlgraph.runtime.worker.executor import Worker

SEEN_S = 5.0  # for files of the driver to become visible on another host
PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)


OnSaved = Callable[[Saved | NotSaved], None]
OnWritten = Callable[[int, Path, Sequence[Written]], None]


@dataclass
class Fired:
    """The data of a fired step that a checkpoint may need: its metrics, the columns of open batches, and recorded rows."""

    metrics: Mapping[str, float]
    columns: Mapping[str, Sequence[Columns]]  # by node, the chunks of its batch
    samples: Sequence[SampledRows] = ()


class WorkerSnapshots:
    """Writes the snapshots of one worker, and calls `told` when each is on the disk, or with the reason why it is not.

    `gather` brings the files to the driver's folder if this host writes into another one.
    """

    def __init__(self, worker: "Worker", saving: Saving, told: OnSaved, gather: OnWritten) -> None:
        self.worker, self.saving, self.told, self._gather = worker, saving, told, gather
        self._thread: threading.Thread | None = None

    def take(self, step: int, recent: Mapping[int, Fired]) -> float:
        """Copy all that the checkpoint after `step` steps needs from this worker, and write it while the run continues.

        Returns the seconds for which the run paused, including the wait for the previous snapshot's write.
        """
        began = time.monotonic()
        self.wait()
        content = contents(self.worker, recent)
        folder = Path(self.saving.folder) / unfinished_name(self.saving.id, step)
        write_model = self._save_engine(folder / str(self.worker.spec.worker.model)) if self.saving.trained else None
        self._thread = threading.Thread(target=self._write, args=(step, folder, content, write_model), name="write checkpoint")
        self._thread.start()
        return time.monotonic() - began

    def wait(self) -> None:
        """Wait until the current write is on the disk."""
        if self._thread is not None:
            self._thread.join()

    def _save_engine(self, folder: Path) -> Callable[[], list[Path]]:
        save: Callable[[Path, float], Callable[[], list[Path]]] = self.worker.context.engine.save
        return save(folder, self.worker.spec.deadline_s)

    def _write(self, step: int, folder: Path, content: Mapping[str, Any], write_model: Callable[[], list[Path]] | None) -> None:
        worker, where = self.worker.spec.worker, self.saving.folder
        try:
            folder.mkdir(exist_ok=True)
            files = [_save(content, folder / f"{file_name(worker.name)}.pt")]
            if write_model is not None:
                files += write_model()
            written = tuple(_digest(folder, file) for file in files)
            where = ""  # later failures are not failures of this host's disk
            self._gather(step, folder, written)
        except Exception as error:  # noqa: BLE001 (the outer edge of a thread: any error is reported to the driver)
            self.told(NotSaved(step, worker.name, f"{type(error).__name__}: {error}{free(where) if where else ''}"))
        else:
            self.told(Saved(step, CheckpointShard(worker.name, worker.nodes, worker.rank, worker.world, files[0].name, written)))
        finally:
            if self.saving.apart:
                shutil.rmtree(folder, ignore_errors=True)


def describe_missing_folder(saving: Saving, patience_s: float = SEEN_S) -> str:
    """Describe what is in place of the driver's locked folder of checkpoints; empty if it is that folder."""
    end = time.monotonic() + patience_s
    while (found := _locked_by(saving)) != saving.id:
        if time.monotonic() > end:
            return found
        time.sleep(0.1)
    return ""


def _locked_by(saving: Saving) -> str:
    """Read the session that the driver noted in the folder, or return what is missing."""
    try:
        return (Path(saving.folder) / "lock").read_text() or "its lock is empty"
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def unfinished_name(id: str, step: int) -> str:
    """Name the folder in which a checkpoint is written until it is complete; no two sessions share one."""
    return f".part-{id}-{step:08d}"


def contents(worker: "Worker", recent: Mapping[int, Fired]) -> dict[str, Any]:
    """Collect what a worker holds at its cut, besides the model that it trains."""
    return {
        "random": random_states(),
        "metrics": {step: dict(fired.metrics) for step, fired in recent.items()},
        "open": {step: {node: list(chunks) for node, chunks in fired.columns.items()} for step, fired in recent.items()},
        "samples": {step: msgspec.msgpack.encode(fired.samples) for step, fired in recent.items()},
        "states": {name: checked_state(name, stage.state()) for name, stage in worker.stages.items() if isinstance(stage, Stateful)},
    }


def checked_state(node: str, state: Any) -> Any:
    """Copy the state of a node. Raises CheckpointError for anything but plain values and tensors, which could not be read back."""
    if isinstance(state, Mapping):
        return {checked_state(node, key): checked_state(node, value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(checked_state(node, value) for value in state)
    if not isinstance(state, PLAIN):
        raise CheckpointError(
            f"state() of node '{node}' holds a {type(state).__name__}; a state is made of None, numbers, text, bytes, tensors, lists, "
            "tuples and dicts of these"
        )
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def free(folder: str) -> str:
    """Describe how much room is left; empty if the folder is gone."""
    try:
        return f" ({shutil.disk_usage(folder).free >> 20} MiB are free on that disk)"
    except OSError:
        return ""


def _save(content: Mapping[str, Any], file: Path) -> Path:
    data = io.BytesIO()  # serialise in memory first, so that a full disk raises the system's error and not the archive writer's
    torch.save(content, data)
    with file.open("wb") as out:
        out.write(data.getbuffer())
        out.flush()
        os.fsync(out.fileno())
    return file


def _digest(folder: Path, file: Path) -> Written:
    """Measure a file's size and checksum."""
    with file.open("rb") as data:
        return Written(str(file.relative_to(folder)), file.stat().st_size, hashlib.file_digest(data, "sha256").hexdigest())


def restore(worker: "Worker", resume: Resume) -> dict[int, Fired]:
    """Restore a loaded worker from a checkpoint, whatever ranks its nodes had in it, and return its last steps.

    Raises CheckpointError for a checkpoint without its nodes, or a state that cannot be distributed over other ranks.
    """
    folder = Path(resume.folder)
    planned = worker.spec.worker
    shards = sorted((p for p in read_shards(folder) if set(p.nodes) == set(planned.nodes)), key=lambda p: p.rank)
    if not shards:
        raise CheckpointError(f"checkpoint '{folder}' has no state of the nodes {list(planned.nodes)}; it belongs to another graph")
    held = [torch.load(folder / shard.file, weights_only=True) for shard in shards]
    same = len(shards) == planned.world
    mine = held[planned.rank] if same else held[0]
    for name, state in mine["states"].items():
        if not same:
            raise CheckpointError(
                f"node '{name}' has a state on each of {len(shards)} ranks, and now there are {planned.world}; use as many ranks as before"
            )
        stage: Any = worker.stages[name]
        stage.load_state(state)
    opened = mine["open"] if same else {step: _shared_out(worker, [h["open"][step] for h in held]) for step in mine["open"]}
    recorded = [mine] if same else held if planned.rank == 0 else []
    if worker.spec.saving is not None and worker.spec.saving.trained:
        worker.context.engine.load(folder / str(planned.model))
    if same:
        set_random_states(mine["random"])
    return {
        step: Fired(average_metrics(rank["metrics"][step] for rank in held), chunks, _recorded_rows(recorded, step))
        for step, chunks in opened.items()
    }


def _recorded_rows(held: Sequence[Mapping[str, Any]], step: int) -> list[SampledRows]:
    """Read the recorded rows of a step; checkpoints of older versions have none."""
    found = [rank["samples"][step] for rank in held if "samples" in rank]
    return [rows for data in found for rows in msgspec.msgpack.decode(data, type=list[SampledRows])]


def _shared_out(worker: "Worker", ranks: Sequence[Mapping[str, Sequence[Columns]]]) -> dict[str, list[Columns]]:
    """Select this rank's rows of open batches that another number of ranks wrote. Rank 0 wrote all rows of nodes that do not generate."""
    rank, world = worker.spec.worker.rank, worker.spec.worker.world
    found: dict[str, list[Columns]] = {}
    for node in ranks[0]:
        if worker.spec.node(node).traits.work != "generate":
            found[node] = list(ranks[0][node])
            continue
        whole = [concat_rows(chunks) for chunks in zip(*(held[node] for held in ranks), strict=True)]
        found[node] = [{name: _share(column, rank, world) for name, column in chunk.items()} for chunk in whole]
    return found


def _share(column: Column, rank: int, world: int) -> Column:
    own = rows_of_rank(len(column), rank, world)
    return column[own.start : own.stop]


def read_shards(folder: Path) -> list[CheckpointShard]:
    """Read the data of the workers in a checkpoint, as listed in its manifest."""
    return msgspec.convert(json.loads((folder / "manifest.json").read_text())["parts"], list[CheckpointShard])


def random_states() -> dict[str, Any]:
    """Collect the states of the process's random generators: Python's, numpy's, torch's."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = (str(name), torch.from_numpy(np.array(keys, dtype=np.int64)), int(position), int(has_gauss), float(gauss))
    found = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the random generators to the states that `random_states` collected."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
