"""The device-seconds of a run as rows that add up to 100 %, as data and as a table for the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlgraph.analysis import words

Use: TypeAlias = Literal["node", "moving", "sleep", "carry", "tools", "data", "weights", "room", "order", "idle", "start", "unexplained"]
BUSY: tuple[Use, ...] = ("node", "moving", "sleep", "carry")
LEAST = 0.002  # of a pool's time: smaller rows are added up into one line of the table
HAND_OVER = "hand-over"  # the cause of a wait in which nobody upstream worked: the message was on its way
SMALL = "smaller rows together"


@dataclass(frozen=True)
class Row:
    """Device-seconds of one use of a device.

    `name` is the node, weights event, channel or feedback edge; `cause` is the activity that a wait was for; `model` is the model that the
    worker is one of several ranks of, else empty.

    | use | the device |
    |---|---|
    | `node` | runs a node |
    | `moving` | publishes, receives or loads weights |
    | `sleep` | copies the memory of an engine that shares its devices to the host or back |
    | `carry` | copies and checks columns around a node |
    | `tools` | waits for tools or environments: no response can decode |
    | `data` | waits for a message |
    | `weights` | waits for a weight version |
    | `room` | waits for a free slot of a channel |
    | `order` | waits for another node of its pool that comes first in the order |
    | `idle` | has no step to work on |
    | `start` | starts up, before the first step or after a restart |
    | `unexplained` | has no span |
    """

    pool: str | None
    worker: str
    use: Use
    name: str
    cause: str
    seconds: float
    model: str = ""

    def __str__(self) -> str:
        cause = " on its way" if self.cause == HAND_OVER else f", since {words.clean(self.cause)} was not done" if self.cause else ""
        name = words.clean(self.name)
        match self.use:
            case "node" | "moving" | "sleep":
                return name
            case "carry":
                return f"rlgraph around {name}: copies and checks"
            case "tools":
                return f"engine waits for tools or environments of {name}"
            case "data":
                return f"wait for data of '{name}'{cause}"
            case "weights":
                return f"wait for a version of '{name}'{cause}"
            case "room":
                return f"wait for a free slot of '{name}'{cause}"
            case "order":
                return f"wait for order in the pool ('{name}'){cause}"
            case "unexplained":
                return "not explained"
            case _:
                return name


@dataclass(frozen=True)
class Bubbles:
    """The use of each device-second from `start_s` to `end_s`.

    `pools` counts each device once, `workers` the time of each worker. Rows without a pool belong to host processes; each counts as one
    device.
    """

    start_s: float
    end_s: float
    pools: tuple[Row, ...]
    workers: tuple[Row, ...]

    @property
    def residual(self) -> float:
        """The share of device-seconds that no row explains."""
        return _share(self.pools, (row for row in self.pools if row.use == "unexplained"))

    def of_pool(self, pool: str | None) -> tuple[Row, ...]:
        """The rows of a pool (None: the host's), largest first."""
        return _sorted(row for row in self.pools if row.pool == pool)

    def of_worker(self, worker: str) -> tuple[Row, ...]:
        """The rows of one worker, largest first."""
        return _sorted(row for row in self.workers if row.worker == worker)

    def share(self, rows: Iterable[Row], within: Sequence[Row]) -> float:
        """Compute the share of the seconds `within` that `rows` take."""
        return _share(within, rows)

    def busy(self, pool: str | None) -> float:
        """The share of a pool's time in which it works."""
        rows = self.of_pool(pool)
        return _share(rows, (row for row in rows if row.use in BUSY))

    def __rich__(self) -> Table:
        return table(self)

    def __str__(self) -> str:
        console = Console(width=words.PAGE, color_system=None)
        with console.capture() as captured:
            console.print(table(self))
        return captured.get().rstrip("\n")


def table(bubbles: Bubbles) -> Table:
    """Print the rows of each pool as a table: seconds of one device, and the share of the pool's time."""
    span_s = bubbles.end_s - bubbles.start_s
    title = f"where {words.seconds(span_s)} went; {bubbles.residual:.2%} not explained"
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, right in (("pool", False), ("worker", False), ("seconds", True), ("share", True), ("spent on", False)):
        drawn.add_column(name, justify="right" if right else "left", no_wrap=name != "spent on", overflow="ellipsis")
    for pool in dict.fromkeys(row.pool for row in bubbles.pools):
        rows = by_model(bubbles.of_pool(pool))
        total = sum(row.seconds for row in rows)
        small = [row for row in rows if row.seconds < LEAST * total]
        name = words.HOST if pool is None else words.clean(pool)
        for row in rows:
            if row not in small:
                style = "" if row.use in BUSY else "red" if row.use == "unexplained" else "yellow"
                drawn.add_row(name, words.clean(row.worker), f"{row.seconds:.2f}", f"{row.seconds / total:.1%}", Text(str(row), style))
        if small:
            rest = sum(row.seconds for row in small)
            drawn.add_row(name, "", f"{rest:.2f}", f"{rest / total:.1%}", SMALL)
        drawn.add_row(name, "", f"{total:.2f}", "100.0%", Text("all", "bold"), end_section=True)
    return drawn


def by_model(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Add up the ranks of each model, largest first."""
    total: dict[Row, float] = {}
    for row in rows:
        key = replace(row, worker=row.model or row.worker, seconds=0.0)
        total[key] = total.get(key, 0.0) + row.seconds
    return _sorted(replace(key, seconds=seconds) for key, seconds in total.items())


def _sorted(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _share(all_rows: Iterable[Row], some: Iterable[Row]) -> float:
    total = sum(row.seconds for row in all_rows)
    return sum(row.seconds for row in some) / total if total else 0.0
