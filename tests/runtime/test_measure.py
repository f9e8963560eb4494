"""What the workers of a step tell, put together."""

from rlgraph.runtime.measure import average_metrics


def test_a_metric_of_several_ranks_is_their_mean_and_an_equal_one_stays_as_it_is() -> None:
    found = average_metrics([{"a": 1.0, "b": 0.1}, {"a": 4.0, "b": 0.1}, {"b": 0.1, "c": 7.0}])
    assert found == {"a": 2.5, "b": 0.1, "c": 7.0}
