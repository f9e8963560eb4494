"""What a job remembers of a long run is what happened last, in memory that does not grow."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from rlgraph.plan.schedule import Span
from rlgraph.runtime.measure import Metrics, Spans

times = st.floats(0, 1e6)
spans = st.builds(
    Span,
    st.sampled_from(["rollout", "update"]),
    st.sampled_from(["fire", "publish", "receive", "load", "wake", "sleep", "carry", "wait", "room", "idle", "start"]),
    st.integers(0, 2**40),
    st.sampled_from(["generator", "policy"]),
    times,
    times,
    st.none() | st.integers(0, 2**40),
    st.none() | st.integers(0, 2**40),
)


@given(st.lists(st.lists(spans, max_size=5), max_size=8), st.integers(1, 20))
def test_the_last_spans_are_kept_as_they_were(reports: list[list[Span]], kept: int) -> None:
    history = Spans(kept)
    for report in reports:
        history.add(report)
    told = [span for report in reports for span in report]
    assert history.since(0.0) == told[-kept:]
    assert len(history) == min(len(told), kept)
    assert history.full == (len(told) >= kept)


def test_spans_are_given_in_seconds_from_a_moment() -> None:
    history = Spans(3)
    history.add([Span("update", "fire", 4, "policy", 12.5, 14.0, 4)])
    assert history.since(10.0) == [Span("update", "fire", 4, "policy", 2.5, 4.0, 4)]


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(allow_nan=False)), max_size=30), st.integers(1, 10))
def test_the_last_metrics_are_kept_with_the_names_each_step_told(steps: list[dict[str, float]], kept: int) -> None:
    history = Metrics(kept)
    for metrics in steps:
        history.add(metrics)
    assert min(len(steps), kept) <= len(history) < 2 * kept
    assert list(history) == steps[len(steps) - len(history) :]


def test_a_thousand_steps_more_take_less_than_a_kilobyte_each() -> None:
    steps = 2000
    spans, metrics = Spans(100_000), Metrics(50_000)
    tracemalloc.start()
    for step in range(steps):
        if step == steps // 2:
            before, _ = tracemalloc.get_traced_memory()
        spans.add(Span(f"node {node}", "fire", step, "worker", step + 0.1, step + 0.2) for node in range(16))
        metrics.add({f"metric {name}": step / 3 for name in range(60)})
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / (steps // 2) < 1024
