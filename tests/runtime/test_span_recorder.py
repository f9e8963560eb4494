"""No moment of a worker has two names or none: spans follow one another, and one inside of another lies within it."""

from itertools import pairwise

from rlgraph.runtime.worker.activity import SpanRecorder


def busy(until: int = 20_000) -> int:
    return sum(range(until))


def test_spans_follow_one_another_without_a_gap() -> None:
    recorder, waited = SpanRecorder("w"), [0.0]
    busy()
    recorder.begin(0)
    for step in range(3):
        with recorder.time_transfer("in", "wait", lambda: waited[0], ("node", "carry"), step):
            busy()
            waited[0] += 1e-5
        busy()
        recorder.carry("node", step)
        with recorder.span("node", "fire", step):
            busy()
        busy()
        recorder.begin(step + 1)
    spans = recorder.take()
    assert [span.kind for span in spans[:5]] == ["start", "wait", "carry", "carry", "fire"]
    assert all(a.end_s == b.start_s for a, b in pairwise(spans))
    assert recorder.take() == []


def test_only_as_much_of_a_move_is_a_wait_as_its_channel_was_blocked() -> None:
    recorder, waited = SpanRecorder("w"), [7.0]
    recorder.begin(0)
    with recorder.time_transfer("out", "room", lambda: waited[0], ("publish weights", "publish"), 0, version=1):
        busy()
        waited[0] += 1e-5
    wait, publish = [span for span in recorder.take() if span.kind in ("room", "publish")]
    assert abs(wait.end_s - wait.start_s - 1e-5) < 1e-9
    assert (publish.name, publish.version, publish.start_s) == ("publish weights", 1, wait.end_s)


def test_a_span_inside_of_another_lies_within_it_and_the_outer_one_is_whole() -> None:
    recorder = SpanRecorder("w")
    recorder.begin(0)
    with recorder.span("rollout", "fire", 0):
        busy()
        with recorder.span("load weights for rollout", "load", 0, version=1):
            busy()
        busy()
    inner, outer = recorder.take()[-2:]
    assert outer.start_s < inner.start_s < inner.end_s < outer.end_s
    assert (inner.kind, outer.kind) == ("load", "fire")
