"""What a recorder asks of a job's workers: rows of what they write, profiles of what they do."""

from collections.abc import Callable, Sequence

from rlgraph.graph.nodes import Graph
from rlgraph.runtime.driver.sample_sources import sample_sources
from rlgraph.runtime.messages import Message, ProfileRequest, SampledRows, SampleRequest

Tell = Callable[[Message], None]


class RecorderPort:
    """The requests of a recorder, which each session of the job tells its workers, and the rows that came of them."""

    def __init__(self, graph: Graph, tell: Tell) -> None:
        self._graph, self._tell = graph, tell
        self._requests: dict[type, SampleRequest | ProfileRequest] = {}
        self._rows: dict[int, list[SampledRows]] = {}
        self.before_commit: Callable[[], None] = lambda: None  # what a recorder still has to write of the steps of a checkpoint

    def request_samples(self, share: float, most: int | None = None, seed: int = 0) -> None:
        """Ask the workers for rows of each further step: a share drawn by `seed`, at most `most`. `sampled_rows` gives them."""
        self._request(SampleRequest(share, most, seed, sample_sources(self._graph)))

    def request_profile(self, request: ProfileRequest) -> None:
        """Ask workers to write profiles of some of the further steps."""
        self._request(request)

    def _request(self, request: SampleRequest | ProfileRequest) -> None:
        self._requests[type(request)] = request
        self._tell(request)

    @property
    def idle(self) -> bool:
        """Whether nothing was asked for."""
        return not self._requests

    def started(self) -> None:
        """Tell the workers of a new session; they send again the rows of steps that were not given."""
        self._rows.clear()
        for request in self._requests.values():
            self._tell(request)

    def take(self, rows: Sequence[SampledRows], finished: int) -> None:
        """Take what workers have sent, and drop rows of the steps that were given: nobody asked for them, or they come twice."""
        self._rows = {step: kept for step, kept in self._rows.items() if step >= finished}
        for each in rows:
            if each.step >= finished:
                self._rows.setdefault(each.step, []).append(each)

    def sampled_rows(self, step: int) -> Sequence[SampledRows]:
        """Take the rows of the step that was given last."""
        return self._rows.pop(step, [])
