"""The tables of docs/developers/scale.md, from the results of `scale.py` and `scale_hosts.py`."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.lib.figures import RESULTS


def tables() -> dict[str, str]:
    """Write every table by its name."""
    scale = json.loads((RESULTS / "scale.json").read_text())
    return {
        "scale-hosts": _hosts(json.loads((RESULTS / "scale_hosts_cpu.json").read_text())),
        "scale-large": _large(scale["large"]),
        "scale-lost": _lost(scale["large"]),
        "scale-intervals": _intervals(scale["intervals"]),
        "scale-anchors": _anchors(scale["anchors"]),
        "scale-transfer": _transfer(scale["fan_out"]),
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]]) + "\n"


def _name(case: Any) -> str:
    return f"{case['model']}, {case['gpus']:,} {case['gpu']}"


def _hosts(found: Any) -> str:
    rows = [
        [
            str(point["hosts"]),
            str(point["depth"]),
            "second" if point["buffers"] == 2 else "",
            " and ".join(map(str, point["kills"])),
            f"{point['rehearsed_s']:.2f} s",
            ", ".join(f"{seconds:.2f}" for seconds in point["runs_s"]) + " s",
            f"{point['error']:+.1%}",
        ]
        for point in found["points"]
    ]
    return _table(("hosts", "depth", "weight buffer", "host killed after step", "simulated before", "measured", "error"), rows)


def _large(rows: Any) -> str:
    return _table(
        ("model, GPUs", "best split, rollout and train", "step, median", "p95", "tokens/s a GPU", "trainer's gathers, not counted"),
        (
            [
                _name(row["case"]),
                f"{row['split']['rollout']:,} and {row['split']['train']:,}",
                f"{row['step_s']:.0f} s",
                f"{row['p95_s']:.0f} s",
                f"{row['tokens_per_s'] / row['case']['gpus']:.0f}",
                f"{row['trainer_gathers_s']:.0f} s",
            ]
            for row in rows
        ),
    )


def _lost(rows: Any) -> str:
    causes = ("failures", "checkpoints", "weights", "batches", "stragglers")
    return _table(
        ("model, GPUs", *causes, "GPUs idle"),
        (
            [
                _name(row["case"]),
                *(f"{row['lost_to'][cause]:.1%}" for cause in causes),
                f"{row['idle']:.0%}",
            ]
            for row in rows
        ),
    )


def _intervals(curves: Any) -> str:
    every = [point["every"] for point in curves[0]["points"]]
    rows = []
    for curve in curves:
        for name, key in (("simulated", "lost"), ("Daly's formula", "daly_lost")):
            label = f"{curve['model']}, {curve['gpus']:,} GPUs, {name}"
            rows.append(
                [label, *(f"{point[key]:.1%}" for point in curve["points"]), f"{curve['daly_every']:.0f}" if key == "daly_lost" else ""]
            )
    return _table(("steps between checkpoints", *map(str, every), "best by Daly"), rows)


def _anchors(rows: Any) -> str:
    return _table(
        ("settings", "published", "modelled", "modelled / published", "split of the model"),
        (
            [
                row["name"],
                f"{row['published_s']:g} s",
                f"{row['modelled_s']:.1f} s",
                f"{row['ratio']:.2f}",
                ", ".join(f"{name} {gpus}" for name, gpus in row["split"].items()),
            ]
            for row in rows
        ),
    )


def _transfer(found: Any) -> str:
    published = f"{next(iter(found['published'].values())):g} s"
    return _table(
        ("bytes of a parameter", "GPUs an engine", "each generator", "from host to host", "published, bfloat16 to fp8"),
        (
            [row["dtype"], str(row["gpus_an_engine"]), f"{row['direct_s']:.2f} s", f"{row['passed_on_s']:.2f} s", published]
            for row in found["1T, 256 to 128 GPUs"]
        ),
    )
