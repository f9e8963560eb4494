"""What a sink is: where a run's numbers, samples and files go while it is recorded."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from rlgraph.analysis.samples import Sample
from rlgraph.errors import PlanError

Ended = Literal["ended", "failed"]
COLUMNS = ("step", "row", "prompt", "response", "reward", "advantage", "finish", "response_tokens", "version_min", "version_max", "kind")


@dataclass(frozen=True)
class RecordedRun:
    """The facts that a sink gets at the start: the run's `name` and `folder`, its settings as text, and how far it was if it resumed.

    `finished` steps are in the checkpoint from which the run goes on; 0 for a new run. `first` is the first step that the sink is given:
    an earlier one, if some of these steps had not come to it. `id` is the same for all parts of one run, and `resumed` says whether the
    sink has begun it before.

    >>> RecordedRun("math", Path("runs/math"), {"rollout.group_size": "8"}, "1f3870be", finished=20, resumed=True).id
    '1f3870be'
    """

    name: str
    folder: Path
    settings: Mapping[str, str]
    id: str
    finished: int = 0
    resumed: bool = False
    first: int = 0


class Sink(ABC):
    """A logger for `rg.record(…, to=[…])`. Derive from it for one of your own.

    >>> class Printed(Sink):
    ...     def scalars(self, step, values):
    ...         print(step, values)
    >>> Printed().scalars(3, {"loss": 0.5})
    3 {'loss': 0.5}

    All methods of a sink are called on one thread of its own, so a slow or broken one never delays a step: what it raises is said once
    and counted, and what does not fit into its queue is dropped and counted. Each step comes once, in order. A sink that
    can drop what it has of later steps sets `rewinds`: after a resume it gets all steps since the checkpoint again. A run that was
    killed within `scalars` or `samples` gives that step again after the resume, since nobody knows how far it came.
    """

    rewinds: ClassVar[bool] = False

    def start(self, run: RecordedRun) -> str | None:  # noqa: B027 (a sink that needs no start has none)
        """Begin, or go on with the run; may give the id under which the sink knows the run, which replaces `run.id` from then on."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:  # noqa: B027
        """Log the recorded samples of a step, as `rlgraph.analysis.samples.FIELDS` names their values."""

    def artifact(self, path: Path) -> None:  # noqa: B027
        """Keep a file of the run, such as its report, once the run has ended."""

    def close(self, ended: Ended) -> None:  # noqa: B027
        """End, after everything else; `ended` says whether the loop over the steps ended or raised."""


def needs(sink: Sink, package: str, extra: str) -> None:
    """Raise PlanError with the command that installs a sink's package, if it is missing. Imports nothing."""
    if find_spec(package) is None:
        raise PlanError(f"sinks.{type(sink).__name__}: the package {package} is not installed: pip install 'rlgraph-dataflow[{extra}]'")


class Names:
    """Metric names as a sink takes them: `@` becomes `_at_`, other characters that it refuses `_`; no two names become one.

    With `files` each name is a path of a file, so none is the folder of another.

    >>> names = Names(r"[^\\w./-]")
    >>> names["val/acc/mean@8"], names["a b"], names["a_b"], names["a b"]
    ('val/acc/mean_at_8', 'a_b', 'a_b_2', 'a_b')
    >>> files = Names(r"[^\\w./-]", files=True)
    >>> files["turns"], files["turns/p90"], files["loss/mean"], files["loss"]
    ('turns', 'turns.p90', 'loss/mean', 'loss_2')
    """

    def __init__(self, refused: str, files: bool = False) -> None:
        self._refused, self._files = re.compile(refused), files
        self._given: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._given:
            plain = self._refused.sub("_", self._refused.sub(lambda found: "_at_" if found[0] == "@" else found[0], name))
            if self._files and any(plain.startswith(f"{other}/") for other in self._given.values()):
                plain = plain.replace("/", ".")
            number, given = 1, plain
            while self._is_taken(given):
                number += 1
                given = f"{plain}_{number}"
            self._given[name] = given
        return self._given[name]

    def _is_taken(self, name: str) -> bool:
        return any(name == other or (self._files and other.startswith(f"{name}/")) for other in self._given.values())


def table(rows: Sequence[Sample]) -> list[list[object]]:
    """List the values of `COLUMNS` of each sample."""
    return [[row[name] for name in COLUMNS] for row in rows]
