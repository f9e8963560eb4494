"""One Ray for all tests that start workers."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    import ray

    from rlgraph.runtime.driver.ray_cluster import start_ray

    ours = start_ray()
    yield
    if ours:
        ray.shutdown()


@pytest.fixture
def ray_unless_forked(request: pytest.FixtureRequest, dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one Ray where the test's `dispatch` needs it; with "calls" it has no Compiled Graphs."""
    if dispatch not in ("forked", "processes"):
        request.getfixturevalue("ray_here")
    if dispatch == "calls":
        monkeypatch.setitem(sys.modules, "ray.dag", None)
