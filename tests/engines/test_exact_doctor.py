"""`rlgraph doctor exact`: the first operation that gives other numbers in the trainer than in the engine, by its name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_programs
from support.paths import PROGRAMS
from support.tiny import tiny_llama, tiny_qwen

from rlgraph.engines.exact.diagnosis import MEANING, OF_LAYER, ComparedOperation, ExactDiagnosis, Witness, diagnose, names, of_text
from rlgraph.errors import DataError

pytestmark = pytest.mark.stage("plugins")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process found of a model: `exact_doctor_process.py`."""
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    script = str(PROGRAMS / "exact_doctor_process.py")
    done = forked_programs.run(script, str(tiny_qwen(folder, "qwen3")), str(out), cwd=out, timeout_s=290)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = torch.load(out / "found.pt")
    return loaded


@pytest.mark.vllm
def test_all_operations_are_equal_on_a_cpu_but_for_those_that_are_rotated_within_attention(found: dict[str, Any]) -> None:
    seen = {name.rsplit(".", 1)[-1] for name in found["all"]}
    assert seen == {"embedding", *OF_LAYER, "log_probs"} - {"query", "key"}
    assert found["exact"] is None
    assert found["exact again"] is None


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("put_back", "first"),
    [("linear", "0.qkv"), ("attention", "0.attention"), ("rotation", "0.attention"), ("log-softmax", "log_probs"), ("norm", "1.mlp_norm")],
)
def test_the_first_operation_that_differs_is_named(found: dict[str, Any], put_back: str, first: str) -> None:
    assert found[put_back] == first


def test_a_diagnosis_prints_what_differs_and_where_it_began() -> None:
    parts = [
        ComparedOperation("0.norm", 0, 139, 0, 24, 0.0),
        ComparedOperation("0.attention", 3, 139, 2, 24, 2e-7),
        ComparedOperation("log_probs", 0, 0, 4, 24, 1e-6),
    ]
    printed = str(ExactDiagnosis("tiny", "cpu", tuple(parts)))
    assert printed.startswith("tiny on a CPU: 3 operations, 24 sampled tokens, of which 2 differ\nfirst: 0.attention, attention")
    assert printed.splitlines()[4].split() == ["0.attention", "3", "of", "139", "2", "of", "24", "2.0e-07"]
    assert '"first": "0.attention"' in ExactDiagnosis("tiny", "cpu", tuple(parts)).to_json()
    equal = ExactDiagnosis("tiny", "cuda", (parts[0],))
    assert equal.first is None
    assert str(equal).endswith("on a GPU: 1 operations, 0 sampled tokens: engine and trainer are equal in every bit")
    assert set(MEANING) == {name.rsplit(".", 1)[-1] for name in names(1)} | {"log_probs"}


def test_a_text_is_put_together_from_the_passes_of_a_batch() -> None:
    witness = Witness(torch.nn.Linear(1, 1))
    rows = [torch.arange(7), torch.tensor([10, 11]), torch.tensor([20, 21])]  # of prompts of 3 and of 4 tokens, then one token of each
    places = [torch.tensor([0, 1, 2, 0, 1, 2, 3]), torch.tensor([30, 4]), torch.tensor([31, 5])]
    places = [places[0], torch.tensor([3, 40]), torch.tensor([4, 41])]
    for own, positions in zip(rows, places, strict=True):
        witness.positions.append(positions)
        witness.add("embedding", own[:, None])
    assert of_text(witness, 3, 8)["embedding"][:, 0].tolist() == [0, 1, 2, 10, 20]


def test_a_family_without_proof_is_refused(tmp_path: Path) -> None:
    from support.families import folder_of

    with pytest.raises(DataError, match="the family 'gemma2' is not proven to be exact"):
        diagnose(str(folder_of("gemma2", tmp_path)))
    with pytest.raises(DataError):
        diagnose(str(tmp_path / "nothing"))
    assert (tiny_llama(tmp_path) / "config.json").exists()
