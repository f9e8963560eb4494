"""Warm processes: they have imported what workers need, and live from one launch of the program to the next."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from rlgraph.errors import RlgraphError
from rlgraph.runtime.driver.warm_processes import Template, WarmWorker
from rlgraph.runtime.worker.orders import ForkOrder

OTHERWISE = {"PYTHONPATH", "PYTEST_CURRENT_TEST"}  # variables that are not read by imports; a worker gets its own path
MOST_TEMPLATES = 6  # processes that are kept; each takes some hundred MB
Key: TypeAlias = tuple[str, frozenset[tuple[str, str]], Hashable]


@dataclass(frozen=True)
class Wanted:
    """What a worker needs of its process: environment, imports, whether these open a GPU, and what its engine is, if that can be kept."""

    name: str
    environment: Mapping[str, str]
    prepare: Callable[[], None]
    opens_gpus: bool
    engine: Hashable | None

    @property
    def imports(self) -> str:
        """The function that imports, as `module:name`."""
        return f"{self.prepare.__module__}:{self.prepare.__qualname__}"

    @property
    def key(self) -> Key:
        """What processes have in common that serve the same."""
        return self.imports, frozenset(pair for pair in self.environment.items() if pair[0] not in OTHERWISE), self.engine


class Warm:
    """The warm processes of a program, by what they have imported in which environment; with `engines` those that keep theirs too."""

    def __init__(self, *, engines: bool = False) -> None:
        self.engines = engines
        self._templates: dict[Key, Template] = {}
        self._alone: list[Template] = []
        self._kept: dict[Key, list[WarmWorker]] = {}
        self.ended = False

    def announce(self, wanted: Sequence[Wanted]) -> None:
        """End the kept engines that none of these workers will take, so that their memory is free before others start."""
        needed = Counter(each.key for each in wanted)
        for key, workers in self._kept.items():
            for worker in workers[needed[key] :]:
                worker.end()
            del workers[needed[key] :]
        self._tidy()

    def start(self, wanted: Wanted, order: ForkOrder) -> WarmWorker:
        """Start a worker: with a kept engine, else from the process with its environment and imports, which is started if there is none."""
        if self.ended:
            raise RlgraphError(
                f"worker '{wanted.name}' cannot be started: the block of rg.warm() has been left; start the job inside of it"
            )
        kept = self._kept.get(wanted.key)
        while kept:
            worker = kept.pop(0)
            if not worker.ended():
                worker.again(wanted.name, order)
                return worker
        return self._template(wanted).fork(wanted.name, order)

    def keep(self, wanted: Wanted, worker: WarmWorker) -> None:
        """Keep a worker that has done its job, for the next that wants the same."""
        self._kept.setdefault(wanted.key, []).append(worker)

    def _template(self, wanted: Wanted) -> Template:
        if wanted.opens_gpus:
            self._alone.append(Template.start(wanted.imports, wanted.environment, alone=True))
            return self._alone[-1]
        key = (*wanted.key[:2], None)
        template = self._templates.pop(key, None)
        if template is None or not template.lives():
            if template is not None:
                template.end()
            self._make_room()
            template = Template.start(wanted.imports, wanted.environment)
        self._templates[key] = template  # the last one is the one that was used last
        return template

    def _make_room(self) -> None:
        for key in [key for key, template in self._templates.items() if template.idle()][: len(self._templates) + 1 - MOST_TEMPLATES]:
            self._templates.pop(key).end()

    def _tidy(self) -> None:
        """Take away the processes that have ended."""
        for template in [template for template in self._alone if not template.lives()]:
            template.end()
            self._alone.remove(template)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the warm processes."""
        return tuple(template.process.pid for template in (*self._templates.values(), *self._alone) if template.lives())

    def end(self) -> None:
        """End all of them."""
        self.ended = True
        for template in (*self._templates.values(), *self._alone):
            template.end()
        self._templates.clear()
        self._alone.clear()
        self._kept.clear()


_HERE: ContextVar[Warm | None] = ContextVar("warm", default=None)


@contextmanager
def warm(*, engines: bool = False) -> Iterator[Warm]:
    """Launch jobs in this block from warm processes: those after the first start in seconds. Leaving the block ends the processes.

        with rg.warm(engines=True):
            for lr in (1e-6, 3e-6, 1e-5):
                with rg.compile(graph(lr), rg.local_cluster()).launch() as job:
                    for step in job.steps(20):
                        ...

    The first launch starts a process that imports PyTorch and transformers, and one that imports vLLM where the plan has it. Workers are
    forked from them, so they begin in milliseconds, and as clean as new ones: no state of a job is left for the next, whether it ended
    or failed, and the results are the same bits. Modules of your own are imported anew at each launch. Other environment variables,
    threads or GPUs get processes of their own. The jobs run without Ray, on this host. Nothing starts before the first launch, and a thread
    that the program starts is not in the block. On GPUs the imports of vLLM open the driver, which no fork lives through: each of its
    engines has a process of its own there, which starts with its job.

    With `engines=True` an engine of vLLM stays loaded when its job has ended. A later launch takes it if its `rg.Generator` is the same but
    for pool and sampling, on the same devices, with room for as many versions of the weights. A launch that does not take it ends it before
    anything starts, and a job that fails keeps none. It begins with the weights of the folder as they are then, and the results are again
    those of a new engine in every bit. In between it keeps its memory. Threads that your own code starts in its process stay there. Other
    engines, and folders of quantised weights, are loaded anew, and a notice says so.

    >>> import rlgraph as rg
    >>> with rg.warm() as processes:
    ...     processes.pids
    ()

    Raises RlgraphError inside of another such block. In the block a launch raises PlanError for a plan of several hosts, for a
    `dispatch=`, and for a `transport=` that needs Ray.
    """
    if _HERE.get() is not None:
        raise RlgraphError("rg.warm() inside of rg.warm(): the launches of a block share its processes already; leave the inner one out")
    mine = Warm(engines=engines)
    before = _HERE.set(mine)
    try:
        yield mine
    finally:
        _HERE.reset(before)
        mine.end()


def here() -> Warm | None:
    """The warm processes of the block that this program is in."""
    return _HERE.get()
