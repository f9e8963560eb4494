"""On a real run every device-second has a name, and the names are right: what sleeps is a node, what waits says for whom."""

import pytest
from support import fakes, forked_workers

from rlgraph.analysis.attribution import Bubbles

STEPS = 10


def measured(depth: int, generate_s: float, train_s: float, **options: object) -> tuple[Bubbles, Bubbles]:
    """Return the bubbles of the whole run, and those without its first two steps."""
    graph = fakes.vector_loop(depth, generate_s=generate_s, train_s=train_s, **options)  # type: ignore[arg-type]
    with forked_workers.job(graph) as job:
        list(job.steps(STEPS))
        run = job.run()
        return run.bubbles, run.steady_bubbles


def part(bubbles: Bubbles, worker: str, use: str, cause: str = "") -> float:
    """Return how the time in which a worker waits for `cause` (or works) compares with all that it works and waits."""
    rows = [row for row in bubbles.of_worker(worker) if row.use in ("node", "data", "weights", "order")]
    return bubbles.share((row for row in rows if row.use == use and row.cause == cause), rows)


def test_a_slow_update_leaves_the_generator_waiting_for_its_versions() -> None:
    whole, steady = measured(1, generate_s=0.1, train_s=0.3)
    assert whole.residual <= 0.01
    assert steady.residual <= 0.01
    assert part(steady, "generator", "weights", "update") == pytest.approx(2 / 3, abs=0.2)
    assert steady.busy("train") > 0.7
    assert any(row.use == "start" for row in whole.of_pool("rollout"))
    assert not any(row.use == "start" for row in steady.of_pool("rollout"))


def test_on_policy_each_pool_waits_for_the_other() -> None:
    _, steady = measured(0, generate_s=0.2, train_s=0.2, ranks=2)
    assert steady.residual <= 0.01
    for rank in range(2):
        assert part(steady, f"generator[{rank}]", "weights", "update") == pytest.approx(0.5, abs=0.2)
    assert part(steady, "policy", "data", "rollout") == pytest.approx(0.5, abs=0.2)
