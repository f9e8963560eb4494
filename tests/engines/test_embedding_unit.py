"""A large embedding is gathered by itself: the bits are those of one gathered with the head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from programs.embedding_ranks import run_ranks

pytestmark = pytest.mark.stage("ranks")


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_an_embedding_of_its_own_changes_no_bit(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    together: list[Any] = run_ranks(folder, tmp_path / "together", apart=False)
    apart: list[Any] = run_ranks(folder, tmp_path / "apart", apart=True)
    for one, other in zip(together, apart, strict=True):
        assert "FSDPEmbedding" not in one["units"]
        assert ("FSDPEmbedding" in other["units"]) == (model == "untied")  # what the head shares stays with it
        assert one["metrics"] == other["metrics"]
        assert all(torch.equal(tensor, other["state"][name]) for name, tensor in one["state"].items())
