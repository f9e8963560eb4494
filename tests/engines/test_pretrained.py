"""Model folders are checked, and made once."""

import json
from pathlib import Path

import pytest
import torch

from rlgraph.engines.hf.pretrained import check_model, model_folder, parameter_shapes, smollm2, tiny_model
from rlgraph.errors import DataError


def test_a_model_folder_is_summarised(tied: Path) -> None:
    summary = check_model(tied)
    assert (summary.vocab_size, summary.layers, summary.context_length, summary.tied, summary.eos_token_ids) == (288, 2, 256, True, (0,))


def test_a_model_folder_with_other_values_of_its_config_is_a_folder_of_links(tied: Path, tmp_path: Path) -> None:
    made = [Path(model_folder(str(tied), tmp_path, config={"max_position_embeddings": context})) for context in (4096, 4096, 8192)]
    assert made[0] == made[1] != made[2]
    assert [check_model(folder).context_length for folder in made] == [4096, 4096, 8192]
    assert check_model(tied).context_length == 256
    assert (made[0] / "model.safetensors").resolve() == (tied / "model.safetensors").resolve()
    with pytest.raises(DataError, match=r"has no 'max_positions'; did you mean 'max_position_embeddings'\?"):
        model_folder(str(tied), tmp_path, config={"max_positions": 1})


def test_a_model_folder_can_have_another_chat_template(tied: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    made = Path(model_folder(str(tied), tmp_path, chat_template=template))
    assert (made / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (made / "config.json").read_text() != ""
    with pytest.raises(DataError, match="there is no such file; pass a file of Jinja"):
        model_folder(str(tied), tmp_path, chat_template="none.jinja")


def test_the_end_tokens_of_generation_come_before_those_of_the_model(tied: Path, tmp_path: Path) -> None:
    for file in tied.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert check_model(tmp_path).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        (None, "no such folder"),
        ([], "no config.json"),
        (["config.json"], "no \\*.safetensors"),
        (["config.json", "model.safetensors"], "config.json has no 'model_type'"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, files: list[str] | None, rule: str) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    with pytest.raises(DataError, match=rule):
        check_model(folder)


def test_a_tied_head_is_no_parameter_of_its_own(tied: Path, untied: Path) -> None:
    assert parameter_shapes(untied).keys() - parameter_shapes(tied).keys() == {"lm_head.weight"}


def test_the_same_seed_gives_the_same_tiny_model_and_leaves_the_random_state(tied: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    again = tiny_model(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tied / "model.safetensors").read_bytes()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_is_made_once(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model(folder, seed=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multiple of 64"):
        tiny_model(tmp_path / "model", hidden=96)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be created"):
        tiny_model(tmp_path / "file" / "model")


def test_the_tiny_tokenizer_gives_any_text_back(tied: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tied)
    text = "2 + 3 = 5\n ä\t€"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.encode())
    assert 0 not in tokens


@pytest.mark.stage("jobs")
def test_smollm2_counts_and_its_tokenizer_gives_text_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda file: read.append(file) or reader(file))
    folder = smollm2(tmp_path / "smollm2")
    assert len(read) == 1, "parsing the file takes four seconds"
    assert capfd.readouterr().err == ""  # no progress bars
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "2 + 3 = 5\n7 + 6 = 13\n4 + 4 ="
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eos_token == "<|im_end|>"  # examples end with it, and so do responses
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        written = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(written[0, len(tokens) :]) == " 8"
