"""What a curriculum's folder says of its graphs: which are done, and from which weights each began."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.curriculum.stages import Stage
from rlgraph.errors import CheckpointError
from rlgraph.graph.nodes import Graph
from rlgraph.plan.plan import Plan
from rlgraph.runtime.checkpoint.fingerprint import difference, fingerprint

DONE, BEGAN, MODEL, CHECKPOINTS = "done.json", "began.json", "model", "checkpoints"


@dataclass(frozen=True)
class StageFolder:
    """The folder of one graph: its records, its checkpoints, and once it is done its final weights."""

    path: Path

    @property
    def model(self) -> Path:
        """The folder of its final weights."""
        return self.path / MODEL

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / CHECKPOINTS

    def finished(self, stage: Stage) -> bool:
        """Tell whether the graph is done. Raises CheckpointError if another graph is done here, or its weights are gone."""
        if not (self.path / DONE).exists():
            return False
        found = difference(json.loads((self.path / DONE).read_text()), told(stage, stage.plan))
        if found:
            raise CheckpointError(f"'{self.path}' holds a graph that is done, and is another one: {found}; give another folder")
        if stage.stand_in is not None and not self.model.is_dir():
            raise CheckpointError(f"'{self.path}' says that its graph is done, but '{self.model}' is gone; give another folder")
        return True

    def say_done(self, stage: Stage, plan: Plan) -> None:
        """Note that the graph is done."""
        _write(self.path / DONE, told(stage, plan))

    def begin(self, weights: Mapping[str, str]) -> None:
        """Note the weights that the graph begins from: digests by earlier graph.

        Raises CheckpointError if it began from others, which its checkpoints do not go with.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self.checkpoints.exists() and (self.path / BEGAN).exists():
            found = difference(json.loads((self.path / BEGAN).read_text()), dict(weights))
            if found:
                raise CheckpointError(f"'{self.checkpoints}' are of a run from other weights: {found}; give another folder")
        _write(self.path / BEGAN, dict(weights))


def told(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Collect, as plain values, what a graph that is done and the one that is asked for must have in common."""
    assert isinstance(plan.source, Graph)
    found = fingerprint(plan.source, plan)
    found.pop("revisions", None)  # of stand-ins, while the graph is planned
    return {"steps": stage.steps, "hands on": stage.stand_in is not None, **found}


def digest(folder: Path) -> str:
    """Hash the weights in a folder."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            whole.update(hashlib.file_digest(data, "sha256").digest())
    return whole.hexdigest()


def lines_of(folder: Path) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of each step so far."""
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        yield json.loads(line)


def _write(path: Path, value: Any) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1))
    unfinished.replace(path)
