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


@pytest.mark.parametrize("width", [*WIDTHS, masks.CACHED + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_rows_are_spread_over_their_masks(width: int, dtype: torch.dtype) -> None:
    mask, rows = flags(70, width, 0.5)[: 3 if width > masks.CACHED else 70], torch.linspace(-1, 1, 70, dtype=dtype)
    rows = rows[: len(mask)]
    assert torch.equal(masks.spread(rows, mask), torch.where(mask, rows[:, None], 0.0))
    assert torch.equal(masks.spread(rows, mask.T.contiguous().T), torch.where(mask, rows[:, None], 0.0))
    assert masks.spread(rows[:0], mask[:0]).shape == (0, width)
