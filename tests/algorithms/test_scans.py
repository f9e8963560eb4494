"""Sums over what follows and what came before, whatever the width."""

import pytest
import torch
from support.ragged_batches import ESTIMATORS, batch

from rlgraph.algorithms import masks

WIDTHS = (1, 31, 32, 33, 64, 96, 1024)


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_discounted_sums_equal_their_definition(width: int, discount: float) -> None:
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    expected, following = torch.empty_like(values), torch.zeros(5, dtype=torch.float64)
    for t in reversed(range(width)):
        expected[:, t] = following = values[:, t] + discount * following
    torch.testing.assert_close(masks.discounted_sum(values, discount), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", WIDTHS)
def test_running_sums_equal_their_definition(width: int) -> None:
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    torch.testing.assert_close(masks.running_sum_(values.clone()), values.cumsum(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [9, 64])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_size_of_blocks_changes_no_bit(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = batch(0, length=length)
    whole = ESTIMATORS[name](columns)
    monkeypatch.setattr(masks, "CACHED", 3 * length)  # 3 of 8 rows
    assert len(masks.blocks(columns["response_mask"])) == 3
    assert all(torch.equal(column, whole[key]) for key, column in ESTIMATORS[name](columns).items())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_how_columns_lie_in_memory_changes_nothing(name: str) -> None:
    columns = batch(0, length=64)
    turned = {key: column.T.contiguous().T if column.ndim == 2 else column for key, column in columns.items()}
    expected = ESTIMATORS[name](columns)
    assert all(torch.allclose(column, expected[key], rtol=0, atol=1e-12) for key, column in ESTIMATORS[name](turned).items())
