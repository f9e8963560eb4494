"""The sink Weights & Biases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlgraph.analysis.samples import Sample
from rlgraph.errors import PlanError
from rlgraph.recording.sinks.base import COLUMNS, Ended, RecordedRun, Sink, needs, table
from rlgraph.settings import Name, check


@dataclass
class WandB(Sink):
    """Log a run to Weights & Biases: scalars, settings, the samples of each step as a table, and the report as an artifact.

    >>> import rlgraph as rg
    >>> rg.sinks.WandB(project="math", mode="offline").mode  # upload later by `wandb sync`
    'offline'

    `name` is the name of the run's folder if it is not given. `mode` None is as the environment says (`WANDB_MODE`). A run that resumed
    goes on under the same id. Needs the extra `wandb`.
    """

    project: Name = "rlgraph"
    name: Name | None = None
    entity: Name | None = None
    group: Name | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    folder: str | Path | None = None
    _run: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self, PlanError)
        needs(self, "wandb", "wandb")

    def start(self, run: RecordedRun) -> None:
        import wandb

        folder = Path(self.folder) if self.folder is not None else run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            group=self.group,
            tags=self.tags,
            dir=folder,
            mode=self.mode,
            id=run.id,
            resume="allow",
            config=dict(run.settings),
            reinit="create_new",  # another run of this process goes on undisturbed
            settings=wandb.Settings(console="off", silent=True),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(columns=list(COLUMNS), data=table(rows))}, step=step)  # a table of its own for each step

    def artifact(self, path: Path) -> None:
        import wandb

        kept = wandb.Artifact(f"{self._run.id}-{path.stem}", type="record")
        kept.add_file(str(path))
        self._run.log_artifact(kept)

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "ended" else 1)
