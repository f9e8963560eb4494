"""Hops that were measured: their table on the console, and the goals they are held against. `channels.py` measures them."""

import statistics
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

KIB, MIB = 2**10, 2**20
WARM_UP = 5
WAIT_S = 3.0


@dataclass(frozen=True)
class Row:
    """Seconds a hop of one transport takes at one size; `note` says what was special, or why there is no figure."""

    transport: str
    size: int
    median_s: float | None
    p10_s: float | None
    p90_s: float | None
    hops: int
    note: str = ""


def row(transport: str, size: int, seconds: list[float], note: str = "") -> Row:
    kept = sorted(seconds[min(WARM_UP, len(seconds) // 3) :])
    return Row(transport, size, statistics.median(kept), kept[len(kept) // 10], kept[len(kept) * 9 // 10], len(kept), note)


def show(rows: list[Row], trips: list[Row], waiting: dict[str, float], console: Console) -> None:
    table = Table("size", "transport", "median", "p10 - p90", "GiB/s", "hops", "note", title="one hop between two processes of one host")
    for size in sorted({r.size for r in rows}):
        for r in (r for r in rows if r.size == size):
            table.add_row(label(size), r.transport, seconds(r.median_s), spread(r), rate(r), str(r.hops), r.note)
        table.add_section()
    for r in trips:
        table.add_row("1 KiB there and back", r.transport, seconds(r.median_s), spread(r), "", str(r.hops), r.note)
    table.add_section()
    for name, share in waiting.items():
        table.add_row(f"waiting {WAIT_S:g} s", name, f"{share:.1%} of a core", "", "", "", "CPU of the whole worker process")
    console.print(table)


def label(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.3f} ms"


def spread(r: Row) -> str:
    return "-" if r.median_s is None else f"{seconds(r.p10_s)} - {seconds(r.p90_s)}"


def rate(r: Row) -> str:
    return "-" if r.median_s is None or r.size < MIB else f"{r.size / r.median_s / 2**30:.1f}"


def goals(rows: list[Row], trips: list[Row], waiting: dict[str, float]) -> list[tuple[str, float, bool]]:
    """List each goal, the figure of this run and whether it was met."""
    found = {(r.transport, r.size): r.median_s for r in rows}

    def ratio(above: str, size: int) -> float:
        over, under = found.get((above, size)), found.get(("rlgraph shm", size))
        return over / under if over and under else float("nan")

    against, copy = ratio("native edge", 16 * MIB), ratio("memcpy", 256 * MIB)
    trip_us, share = (trips[0].median_s or float("nan")) * 1e6, waiting["rlgraph shm"]
    return [
        ("16 MiB, times faster than the native edge (at least 5)", against, against >= 5),
        ("256 MiB, share of memcpy (at least 0.6)", copy, copy >= 0.6),
        ("1 KiB there and back, µs (at most 200)", trip_us, trip_us <= 200),
        ("waiting worker, share of a core (at most 0.03)", share, share <= 0.03),
    ]
