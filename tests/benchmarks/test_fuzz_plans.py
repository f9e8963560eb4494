"""Strange graphs are refused in few words or planned with sound numbers; `benchmarks/reliability/fuzz_plans.py` tries ten thousand."""

import random
from pathlib import Path

import pytest

import rlgraph as rg
from benchmarks.reliability import fuzz_plans
from rlgraph.graph.nodes import declare


@pytest.mark.filterwarnings("ignore")
def test_strange_graphs_are_refused_or_planned(tmp_path: Path) -> None:
    small = [seed for seed in range(300) if fuzz_plans.drawn(random.Random(seed))[3] <= 12]
    found = {seed: fuzz_plans.outcome(seed, tmp_path) for seed in small[:100]}
    assert {
        seed: fault for seed, (_, fault) in found.items() if fault and " nodes on " not in fault
    } == {}  # its seconds depend on the machine
    assert sum(kind == "planned" for kind, _ in found.values()) > 30


@pytest.mark.parametrize("seed", [1387, 1389], ids=["copies while its pool works", "seconds given as whole numbers"])
@pytest.mark.filterwarnings("ignore")
def test_cases_that_went_wrong_once(seed: int, tmp_path: Path) -> None:
    assert fuzz_plans.outcome(seed, tmp_path) == ("planned", "")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: rg.Pool("\ud83d"), "half of a surrogate pair"),
        (lambda: rg.feedback("weights", depth=10**5000), "more than 64 bits"),
        (lambda: rg.planning.Costs({"update": 10**400}), "a cost is a number of seconds"),
        (lambda: declare("node", fuzz_plans.Nothing(), (), reads=(), writes=("a",)), "has neither inputs nor rows"),
    ],
)
def test_values_that_nothing_can_hold_are_refused(made, said: str) -> None:
    with pytest.raises(rg.RlgraphError, match=said):
        made()
