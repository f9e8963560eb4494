"""Warn where plans are compared by plain numbers of seconds, which were given for no device count or rows."""

from collections.abc import Iterable, Mapping

from rlgraph.costs.costs import Costs
from rlgraph.costs.functions import Setting
from rlgraph.graph.nodes import Graph

Compared = tuple[Graph, Costs, Mapping[str, Setting]]  # one of the plans that are compared


def warnings_of(compared: Iterable[Compared]) -> tuple[str, ...]:
    """Name the nodes whose plain number of seconds is used for several device counts, or for several row counts.

    Nodes on the host, which have no devices, and nodes that take no time are left out.
    """
    places: dict[str, set[tuple[int, int]]] = {}
    seconds: dict[str, float] = {}
    for graph, costs, settings in compared:
        for node in graph.nodes:
            if node.pool is not None and costs.is_plain(node.name):
                places.setdefault(node.name, set()).add((settings[node.name].devices, settings[node.name].rows))
                seconds[node.name] = costs.mean(node.name, Setting())
    by_devices = {name: sorted({devices for devices, _ in seen}) for name, seen in places.items()}
    by_rows = {name: sorted({rows for _, rows in seen}) for name, seen in places.items()}
    found = []
    if apart := {name: counts for name, counts in by_devices.items() if len(counts) > 1}:
        first, counts = next(iter(apart.items()))
        example = ", ".join([f"{counts[0]}: {seconds[first]:.6g}", *(f"{count}: …" for count in counts[1:3])])
        found.append(
            f"the seconds of {_listed(map(repr, apart))} are plain numbers, and are taken to be the same on "
            f"{_listed(map(str, sorted({count for each in apart.values() for count in each})))} devices, which are compared; give the "
            f"seconds on each count, as '{first}': {{{example}}}"
        )
    if apart := {name: counts for name, counts in by_rows.items() if len(counts) > 1}:
        found.append(
            f"the seconds of {_listed(map(repr, apart))} are plain numbers, and are taken to be the same for "
            f"{_listed(map(str, sorted({count for each in apart.values() for count in each})))} rows, which are compared; give it as "
            "rg.NodeCost, or costs that rg.profile measured"
        )
    return tuple(found)


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
