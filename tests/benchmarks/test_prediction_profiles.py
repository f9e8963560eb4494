"""What benchmarks/prediction/prediction.py profiles has engines as wide as those that it predicts, so that no width is assumed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.prediction import prediction
from rlgraph.plan.calibrate import setting_of


def widths(plan: rg.Plan) -> dict[str, float]:
    return {node.name: setting_of(plan, node).width for node in plan.nodes if node.model is not None}


@pytest.mark.parametrize("case", [*prediction.simulated(), *prediction.uneven()], ids=lambda case: f"{case.family}: {case.name}")
def test_engines_are_as_wide_in_the_profile_as_in_the_run(case: prediction.Case) -> None:
    loop = prediction.profiled_loop(case.family)
    profiled = widths(rg.compile(loop.graph(), prediction.cores_for(loop)))
    run = widths(rg.compile(case.graph(), rg.Cluster(cpus=case.cores)))
    assert {name: profiled[name] for name in run} == run
