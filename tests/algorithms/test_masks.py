"""Counting, spreading and whitening under a mask, whatever its width and wherever it lies in memory."""

import pytest
import torch

from rlgraph.algorithms import masks

WIDTHS = (1, 7, 8, 9, 264, 2040, 2048, 4104)


def flags(rows: int, width: int, share: float) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(width)) < share


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_flags_are_counted_however_many_there_are(width: int, share: float) -> None:
    mask = flags(5, width, share)
    assert masks.count(mask, -1).tolist() == [sum(row) for row in mask.tolist()]
    assert int(masks.count(mask)) == sum(map(sum, mask.tolist()))
    assert masks.count(mask, 0).tolist() == [sum(column) for column in zip(*mask.tolist(), strict=True)]
    assert masks.count(mask, -1).dtype is masks.count(mask).dtype is torch.int32


def test_flags_of_a_view_are_counted() -> None:
    whole = flags(6, 24, 0.5)
    for view in (whole[:, 3:19], whole.T[:, :], whole[1:, :8], whole.flatten()[3:67].view(4, 16), whole[:, ::3], whole[:0], whole[:, :0]):
        assert masks.count(view, -1).tolist() == [sum(row) for row in view.tolist()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_rows_are_spread_over_their_masks(width: int, dtype: torch.dtype) -> None:
    mask, rows = flags(70, width, 0.5), torch.linspace(-1, 1, 70, dtype=dtype)
    assert torch.equal(masks.spread(rows, mask), torch.where(mask, rows[:, None], 0.0))
    assert torch.equal(masks.spread(rows, mask.T.contiguous().T), torch.where(mask, rows[:, None], 0.0))
    assert masks.spread(rows[:0], mask[:0]).shape == (0, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_kept_where_numbers_are(dtype: torch.dtype) -> None:
    mask = flags(6, 24, 0.5)
    values = torch.where(mask, torch.randn(6, 24, generator=torch.Generator().manual_seed(0)), float("nan")).to(dtype)
    out = torch.empty_like(values)
    for m, v, o in ((mask, values, out), (mask.T, values.T, out.T), (mask[:, ::3], values[:, ::3], out[:, ::3])):
        expected = masks.keep(v, m)
        assert torch.equal(masks.keep_bits(v, masks.bits(m, v)), expected)
        masks.keep_bits(v, masks.bits(m, v), out=o)
        assert torch.equal(o, expected)


@pytest.mark.parametrize("width", [1, 7, masks.CACHED, masks.CACHED + 1])
def test_blocks_hold_every_row_once_and_fit_the_cache_if_one_row_does(width: int) -> None:
    mask = torch.zeros(1, width, dtype=torch.bool).expand(masks.CACHED // 3, width)
    rows = [row for block in masks.blocks(mask) for row in range(block.start, min(block.stop, len(mask)))]
    assert rows == list(range(len(mask)))
    assert all((block.stop - block.start) * width <= max(masks.CACHED, width) for block in masks.blocks(mask))
    assert masks.blocks(mask[:0]) == []
