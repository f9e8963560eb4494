"""The setting for profiles of some steps of some workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rlgraph.analysis.samples import PROFILES_FOLDER
from rlgraph.errors import PlanError, choices
from rlgraph.plan.plan import Plan
from rlgraph.runtime.messages import ProfileRequest
from rlgraph.settings import Name, Natural, Range, check, refuse_unknown

StepRange = tuple[Natural, Natural]
_asked: "list[Profile]" = []  # by the command line, for the first run that this program records


@refuse_unknown
@dataclass(frozen=True)
class Profile:
    """Choose the steps and workers that `rg.record(…, profile=)` profiles by torch.profiler: steps `first` to `last`, both included.

    >>> import rlgraph as rg
    >>> rg.planning.Profile(steps=(3, 5), workers="policy")  # for rg.record(job, 100, "runs/math", profile=…)
    Profile(steps=(3, 5), workers='policy', memory=None, stacks=False, shapes=False)

    `workers` are names of workers, models or nodes; all workers without it. The files go to `profiles/` of the run's folder, named by
    worker and steps, and the report links them: a trace, a table of operators, and for workers with GPUs the history of CUDA's memory.
    `memory=True` asks for that history, `False` does without; `stacks` adds Python's stacks to the trace and `shapes` those of tensors,
    which make the trace larger. Profiled steps are slower.

    Raises PlanError for steps out of order, and from `rg.record` for a worker that is not there, steps that the run does not reach, and
    `memory=True` where no worker has a GPU.
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
            raise PlanError(f"Profile(steps=({first}, {last})): the first step comes after the last; give them in order, as (3, 5)")

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
