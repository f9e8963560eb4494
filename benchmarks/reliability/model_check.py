"""Every order of firing of every training graph of up to five nodes: no bound broken, no deadlock; seeded faults are caught.

    python benchmarks/reliability/model_check.py [--json PATH] [--nodes N]

UpdateSchedule the whole state space of each schedule at depths 0 to 3 with 1 and 2 buffers. The nodes between rollout and update
are on the host; up to four nodes also on every pool. Faults are seeded in each graph of up to four nodes.
"""

import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.small_graphs import Small, name_of, small_graphs
from support.state_explorer import faults, is_order_safe, promises, scheduled_gives, walk

from benchmarks.lib.command import command_line, write
from rlgraph.plan.events import slots

HARMLESS = "nothing: turns in the pools keep the bound by themselves"


def checked(small: Small) -> int:
    """Count the states of a graph. Raises AssertionError for one in which a promise is broken."""
    graph, schedule = small.schedule()
    promised = promises(schedule, small.depth, name_of(small.rollout), lambda name: slots(graph, graph.node(name)))
    found = walk(schedule, scheduled_gives(schedule), promised)
    assert not found.fault, f"{found.fault}: {small}"
    return found.states


def caught(small: Small) -> dict[str, str]:
    """Check that each seeded fault is caught; give the violation of each. Raises AssertionError for a harmful fault that is not."""
    graph, schedule = small.schedule()
    promised = promises(schedule, small.depth, name_of(small.rollout), lambda name: slots(graph, graph.node(name)))
    found = {name: walk(*changed, promised).fault for name, changed in faults(schedule, name_of(small.nodes - 1)).items()}
    unnoticed = [name for name, fault in found.items() if not fault]
    assert not unnoticed or is_order_safe(schedule, promised), f"unnoticed: {unnoticed} in {small}"
    return {name: fault or HARMLESS for name, fault in found.items()}


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("--nodes", type=int, default=5)
    given_ = arguments.parse_args()
    began, states, graphs = time.time(), Counter[int](), Counter[int]()
    seeded: dict[str, Counter[str]] = {}
    for nodes in range(2, given_.nodes + 1):
        for small in small_graphs(nodes, every_home=nodes < 5):
            states[nodes] += checked(small)
            graphs[nodes] += 1
            if nodes < 5:
                for fault, sign in caught(small).items():
                    seeded.setdefault(fault, Counter())[sign if sign in (HARMLESS, "deadlock") else "a promise broken"] += 1
        print(
            f"{nodes} nodes: {graphs[nodes]} graphs, {states[nodes]:,} states, no promise broken ({time.time() - began:.0f} s)", flush=True
        )
    print(f"in all {sum(graphs.values()):,} graphs, {sum(states.values()):,} states")
    for fault, signs in seeded.items():
        print(f"{fault}, seeded in {sum(signs.values())} graphs: {dict(signs)}")
    if given_.json:
        figures = {
            "graphs": dict(graphs),
            "states": dict(states),
            "states_in_all": sum(states.values()),
            "faults": {fault: dict(signs) for fault, signs in seeded.items()},
            "seconds": time.time() - began,
        }
        write(given_.json, figures)


if __name__ == "__main__":
    main()
