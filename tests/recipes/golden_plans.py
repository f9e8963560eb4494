"""The plans of all recipes on two cores and on eight GPUs, a line each: what a change of the compiler or of a recipe changes.

python tests/recipes/golden_plans.py tests/recipes/golden_plans.txt

A line ends with a digest of the plan as it prints, which has every worker, channel, loop and second of it.
"""

import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from draw_recipes import RECIPES, plans

import rlgraph as rg

CLUSTERS = {"2 cores": rg.Cluster(cpus=2), "8 H100": rg.Cluster(gpus=8, cpus=64, gpu="H100")}


def lines() -> Iterator[str]:
    """Describe each plan of each recipe on each cluster in a line."""
    for name in sorted(path.stem for path in RECIPES.glob("*.py")):
        for label, cluster in CLUSTERS.items():
            for plan in plans(name, cluster):
                workers = Counter(worker.model or "host" for worker in plan.workers)
                yield (
                    f"{name} {plan.graph!r} on {label}: {plan.prediction.step_s:.3g} s per step, staleness at most "
                    f"{plan.certificate.staleness_bound}; {', '.join(f'{count} {who}' for who, count in workers.items())}; "
                    f"{len(plan.channels)} channels; {hashlib.sha256(str(plan).encode()).hexdigest()[:12]}"
                )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
