"""DAPO's overlong penalty and group filtering."""

import pytest
import torch

import rlgraph.algorithms as alg
from rlgraph.errors import DataError, GraphError


def test_the_penalty_grows_over_the_buffer_and_has_no_floor() -> None:
    penalty = alg.OverlongPenalty(max_tokens=100, buffer_tokens=20, factor=0.5)
    assert torch.allclose(penalty.penalties(torch.tensor([0, 80, 81, 90, 100, 200])), torch.tensor([0, 0, -0.025, -0.25, -0.5, -3.0]))


def test_tool_tokens_count_in_the_length() -> None:
    mask = torch.tensor([[True, False, False, True], [True, True, False, False], [False] * 4])
    shaped = alg.OverlongPenalty(max_tokens=4, buffer_tokens=2)({"rewards": torch.ones(3), "response_mask": mask})
    assert shaped["rewards"].tolist() == [0, 1, 1]


def test_a_buffer_beyond_the_longest_response_is_refused() -> None:
    with pytest.raises(GraphError, match="at most max_tokens=10"):
        alg.OverlongPenalty(max_tokens=10, buffer_tokens=11)


def test_constant_groups_are_those_that_teach_nothing() -> None:
    metric = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 7.0])
    ids = torch.tensor([4, 2, 4, 2, 4, 9])
    assert alg.constant_groups(metric, ids).tolist() == [True, False, True, False, True, False]


def test_constant_groups_needs_one_metric_and_one_id_per_response() -> None:
    with pytest.raises(DataError, match=r"'group_ids' is torch.int64 of shape \[4\], the metric has shape \[3\]"):
        alg.constant_groups(torch.zeros(3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match=r"'group_ids' is torch\.float32"):
        alg.constant_groups(torch.zeros(3), torch.zeros(3))


def test_a_group_that_differs_in_the_last_bit_is_not_constant() -> None:
    metric = torch.tensor([1.0, 1.0 + 2**-23])
    assert not alg.constant_groups(metric, torch.zeros(2, dtype=torch.int64)).any()
