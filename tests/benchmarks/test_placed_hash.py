"""The hash by which benchmarks tell whether weights arrived: parts add up to the whole, and nothing that moves goes unseen."""

import pytest
import torch

from benchmarks.lib import placed_hash
from benchmarks.lib.placed_hash import added
from benchmarks.lib.placed_hash import placed_hash as hashed

WHOLE = torch.randn(96, 33, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_parts_add_up_to_the_whole() -> None:
    rows = [hashed(WHOLE[start : start + 40], start * 33) for start in range(0, 96, 40)]
    columns = [hashed(WHOLE[:, :20], 0, (33, 1)), hashed(WHOLE[:, 20:], 20, (33, 1))]
    assert added(*rows) == added(*columns) == hashed(WHOLE)


def test_the_size_of_the_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hashed(WHOLE)
    monkeypatch.setattr(placed_hash, "PIECE", 100)
    assert hashed(WHOLE) == whole


def test_a_permutation_of_elements_rows_or_columns_changes_it() -> None:
    swapped = WHOLE.clone()
    swapped[3, 4], swapped[3, 5] = WHOLE[3, 5], WHOLE[3, 4]
    assert len({hashed(tensor) for tensor in (WHOLE, swapped, WHOLE.flip(0), WHOLE.flip(1), WHOLE.roll(1, 0), WHOLE + 1)}) == 6


def test_a_scalar_and_an_empty_tensor_have_one() -> None:
    assert hashed(torch.tensor(1.0, dtype=torch.bfloat16)) != hashed(torch.tensor(2.0, dtype=torch.bfloat16))
    assert hashed(torch.zeros(0, 4, dtype=torch.bfloat16)) == 0
