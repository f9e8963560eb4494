"""Log-probs of a reference are kept on disk by row: the bits are those of a run without a cache, and no row is computed twice."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.training.reference import CachedScores, model_key, row_keys

PAIRS = [{"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": f" {a} or so"} for a in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "model", vocab=288))


class Counting:
    """An engine that counts the rows that it scores."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.rows = engine, 0

    def scores(self, batch: Any, **settings: Any) -> torch.Tensor:
        self.rows += len(batch["responses"])
        return self.engine.scores(batch, **settings)  # type: ignore[no-any-return]


def test_cached_rows_have_the_bits_of_a_run_without_a_cache_and_are_computed_once(model: str, tmp_path: Path) -> None:
    reference = rg.Reference(model, pool=rg.Pool("reference"), dtype="float32")
    source = rg.pairs(PAIRS, 3, rg.Policy(model, pool=rg.Pool("train")))
    draw = source.node.operation.start(Context())
    engine = Counting(reference.load(Context()))

    def scored(batch: int, *, cache: Path | None) -> tuple[torch.Tensor, dict[str, float]]:
        stage = reference.log_probs(source, cache=cache).node.operation.start(Context(engine=engine))
        found: Any = stage(batch, draw(batch, {}))
        return (found, {}) if isinstance(found, dict) else found  # type: ignore[return-value]

    live = [scored(batch, cache=None)[0]["ref_log_probs"] for batch in range(2)]  # all pairs once
    engine.rows = 0
    for share in (0.0, 1.0):
        for batch in range(2):
            columns, metrics = scored(batch, cache=tmp_path)
            assert torch.equal(columns["ref_log_probs"], live[batch])  # type: ignore[index]
            assert metrics == {"ref_log_probs/cached": share}
    assert engine.rows == 12
    columns, metrics = scored(2, cache=tmp_path)  # a second epoch, in another order
    assert metrics["ref_log_probs/cached"] == 1.0
    assert torch.allclose(columns["ref_log_probs"], scored(2, cache=None)[0]["ref_log_probs"], atol=1e-5)  # type: ignore[index, call-overload]
    engine.engine.close()


def test_the_key_of_a_model_follows_weights_dtype_and_temperature(model: str, tmp_path: Path) -> None:
    other = str(tiny_model(tmp_path / "other", vocab=288, tied=False))
    keys = [
        model_key(*each) for each in ((model, "float32", 1.0), (other, "float32", 1.0), (model, "bfloat16", 1.0), (model, "float32", 0.5))
    ]
    assert len(set(keys)) == 4
    moved = shutil.copytree(model, tmp_path / "moved")
    assert model_key(str(moved), "float32", 1.0) == keys[0]
    file = moved / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    assert model_key(str(moved), "float32", 1.0) not in keys, "other weights in the same folder, of the same size"


def test_the_key_of_a_row_follows_its_tokens_and_not_their_padding() -> None:
    def batch(prompt: list[int], response: list[int], mask: list[bool]) -> dict[str, torch.Tensor]:
        columns = {"prompts": torch.tensor([prompt]), "prompt_mask": torch.tensor([prompt]) != 0}
        return {**columns, "responses": torch.tensor([response]), "response_mask": torch.tensor([mask])}

    same = [batch([0, 5, 6], [7, 8], [True, True]), batch([5, 6], [7, 8, 0], [True, True, False])]
    others = [batch([5], [6, 7, 8], [True] * 3), batch([5, 6], [7, 9], [True, True]), batch([5, 6], [7, 8], [False, True])]
    assert row_keys(same[0]) == row_keys(same[1])
    assert len({row_keys(each)[0] for each in (same[0], *others)}) == 4


def test_a_record_that_was_left_half_written_is_left_out(tmp_path: Path) -> None:
    known, keys = CachedScores(tmp_path), [bytes([n]) * 32 for n in range(3)]
    known.add(keys[:2], torch.tensor([[1.0, 2.0], [3.0, 0.0]]), [2, 1])
    (file,) = tmp_path.glob("*.scores")
    file.write_bytes(file.read_bytes() + keys[2] + (5).to_bytes(4, "little") + b"half")
    again = CachedScores(tmp_path)
    assert again.unknown_rows(keys) == [2]
    assert again.scores(keys[:2], 3).tolist() == [[1, 2, 0], [3, 0, 0]]
    assert CachedScores(tmp_path, writes=False).rows.keys() == known.rows.keys()


def test_what_cannot_be_cached_is_refused(model: str, tmp_path: Path) -> None:
    source = rg.pairs(PAIRS, 3, rg.Policy(model, pool=rg.Pool("train")))
    with pytest.raises(GraphError, match="pass dtype='bfloat16' or 'float32'"):
        rg.Reference(model, pool=rg.Pool("reference")).log_probs(source, cache=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used"):
        CachedScores(tmp_path / "file")
