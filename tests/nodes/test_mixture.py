"""Batches of unlike columns and widths are joined for one optimizer step."""

import torch

from rlgraph.columns import Columns
from rlgraph.nodes.training.update import PART, join_batches


def batch(rows: int, width: int, **more: torch.Tensor) -> Columns:
    return {"responses": torch.ones(rows, width, dtype=torch.int64), "response_mask": torch.ones(rows, width, dtype=torch.bool), **more}


def test_a_column_that_one_batch_lacks_is_as_wide_as_the_joined_responses() -> None:
    narrow, wide = batch(2, 3, old_log_probs=torch.full((2, 3), -1.0), top=torch.ones(2, 3, 4)), batch(1, 5, weights=torch.ones(1))
    for batches in ([narrow, wide], [wide, narrow]):
        found = join_batches(batches)
        mask = found["response_mask"]
        assert isinstance(mask, torch.Tensor)
        for name, shape in (("old_log_probs", (3, 5)), ("top", (3, 5, 4)), ("weights", (3,)), ("responses", (3, 5))):
            column = found[name]
            assert isinstance(column, torch.Tensor)
            assert column.shape == shape, name
        assert found["old_log_probs"].sum() == -6  # type: ignore[union-attr]
        assert found[PART].tolist() == [number for number, each in enumerate(batches) for _ in each["responses"]]  # type: ignore[union-attr]
