"""Data as people have it: files of several schemas, nested columns, folders and globs, data sets of the hub and lists."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import rlgraph as rg
from rlgraph.data.rows import Rows
from rlgraph.errors import DataError

ASKED = [{"role": "user", "content": "1 + 1 ="}]


def verl_row(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": f"id-{number}", "split": "train"},
        **changed,
    }


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as parquet, JSON or JSON lines, by the suffix of the file."""
    if file.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=3)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_verls_rows_are_read_as_they_are(tmp_path: Path, suffix: str) -> None:
    data = rg.data.verl(write(tmp_path / f"train.{suffix}", [verl_row(n) for n in range(7)]))
    assert len(data) == 7
    assert data[5] == {
        "prompt": [{"role": "user", "content": "5 + 1 ="}],
        "answer": "6",
        "data_source": "math_dapo",
        "ability": "MATH",
        "extra_info": '{"index": "id-5", "split": "train"}',
        "index": "id-5",
    }
    prompts = rg.prompts(data, count=3)
    assert prompts.columns == (
        *("prompt_texts", "prompt_messages", "prompt_ids"),
        *("answers", "data_sources", "abilitys", "extra_infos", "indexs"),
    )
    batch = prompts.node.operation.batch(0)
    for text, answer in zip(batch["prompt_texts"], batch["answers"], strict=True):
        assert int(text.partition(" ")[0]) + 1 == int(answer)


def test_numbers_where_verl_has_text_are_text(tmp_path: Path) -> None:
    rows = [verl_row(1, extra_info={"index": 7}, reward_model={"style": "rule", "ground_truth": 2}), verl_row(2)]
    data = rg.data.verl(write(tmp_path / "train.jsonl", rows))
    assert [row["answer"] for row in data] == ["2", "3"]
    assert [row["index"] for row in data] == ["7", "id-2"]
    prompts = rg.prompts(data, count=2)
    prompts.node.operation.check(prompts.node)


def test_keys_that_arrow_adds_to_nested_mappings_are_absent_again(tmp_path: Path) -> None:
    rows = [
        verl_row(1, extra_info={"index": "a", "tools_kwargs": {"calc": {"create_kwargs": {"x": "1"}}}}),
        verl_row(2, extra_info={"index": "b", "tools_kwargs": {"search": {"create_kwargs": {"q": "2"}}}}),
    ]
    rows[0]["prompt"] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    file = write(tmp_path / "train.parquet", rows)
    raw = parquet.read_table(file).to_pylist()
    assert raw[0]["extra_info"]["tools_kwargs"]["search"] is None, "what Arrow gives"
    assert "tool_calls" in raw[1]["prompt"][0]
    data = rg.data.verl(file)
    assert json.loads(data[0]["extra_info"])["tools_kwargs"] == {"calc": {"create_kwargs": {"x": "1"}}}
    assert data[0]["prompt"] == rows[0]["prompt"], "content=None stays, absent keys are absent"
    assert data[1]["prompt"] == rows[1]["prompt"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_fields_are_named_by_their_paths(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"train.{suffix}", [verl_row(n) for n in range(3)])
    read = {"parquet": rg.data.parquet, "jsonl": rg.data.jsonl}[suffix]
    data = read(file, answer="reward_model.ground_truth", turn="prompt.0.role")
    assert data[1] == {"prompt": [{"role": "user", "content": "1 + 1 ="}], "answer": "2", "turn": "user"}
    if suffix == "parquet":
        assert data.source.table.column_names == ["prompt", "reward_model"], "only the columns that are needed are read"
    question = read(file, prompt="extra_info.index")
    assert question[2] == {"prompt": "id-2"}


def test_a_path_goes_through_json_in_a_column() -> None:
    rows = [{"prompt": "1 + 1 =", "info": '{"answer": {"text": "2"}}'}]
    assert rg.data.rows(rows, answer="info.answer.text")[0] == {"prompt": "1 + 1 =", "answer": "2"}


def test_files_come_by_glob_folder_and_list_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, rows in ((2, 2), (0, 3), (1, 1)):
        write(tmp_path / f"part-{number}.jsonl", [{"prompt": f"{number}.{row}"} for row in range(rows)])
    wanted = ["0.0", "0.1", "0.2", "1.0", "2.0", "2.1"]
    for paths in (
        str(tmp_path / "part-*.jsonl"),
        tmp_path,
        sorted(tmp_path.iterdir()),
        [str(tmp_path / "part-[01].jsonl"), tmp_path / "part-2.jsonl"],
    ):
        data = rg.data.jsonl(paths)
        assert [row["prompt"] for row in data] == wanted == [data[index]["prompt"] for index in range(6)]
    assert len(data) == 6
    with pytest.raises(IndexError):
        data[6]


def test_trls_formats_are_read(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows: list[dict[str, Any]] = [
        {"prompt": ASKED, "completion": [{"role": "assistant", "content": "2"}], "tools": tools, "level": 3, "meta": {"a": 1}},
        {"messages": [*ASKED, {"role": "assistant", "content": "2"}], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": ASKED},
        {"prompt": "1 + 1", "completion": " = 2"},
        {"prompt": ASKED},
    ]
    data = rg.data.conversational(write(tmp_path / "train.jsonl", rows))
    assert list(data) == [
        {"prompt": ASKED, "answer": "2", "level": 3, "meta": '{"a": 1}', "tools": tools},
        {"prompt": ASKED, "answer": "2", "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": ASKED, "answer": ""},
        {"prompt": "1 + 1", "answer": " = 2"},
        {"prompt": ASKED},
    ]
    assert list(rg.data.conversational(rg.data.jsonl(tmp_path / "train.jsonl"))) == list(data)


def test_gsm8k_is_read_from_its_files_by_split(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    raw = [{"question": "How many?", "answer": "1000 + 234\n#### 1,234"}]
    write(tmp_path / "main" / "train-00000-of-00001.parquet", raw * 3)
    write(tmp_path / "main" / "test-00000-of-00001.parquet", raw)
    train, test = (rg.data.gsm8k(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (3, 1)
    text = 'How many? Let\'s think step by step and output the final answer after "####".'
    assert train[0] == {"prompt": [{"role": "user", "content": text}], "answer": "1234", "data_source": "openai/gsm8k"}
    assert rg.data.gsm8k(tmp_path, instruction="")[0]["prompt"][0]["content"] == "How many?"


def test_copies_of_a_prompt_in_dapo_math_and_aime_become_one_row(tmp_path: Path) -> None:
    copies = [verl_row(n) for n in (1, 2, 3) for _ in range(32)]
    file = write(tmp_path / "train.parquet", copies)
    assert len(rg.data.verl(file)) == 96
    for read in (rg.data.dapo_math, rg.data.aime):
        assert [row["answer"] for row in read(file)] == ["2", "3", "4"]


AIME: dict[str, dict[str, Any]] = {
    "HuggingFaceH4": {"id": 60, "problem": "Find n.", "solution": "…", "answer": "073", "url": "u", "year": "2024"},
    "Maxwell-Jia": {"ID": "2024-I-1", "Problem": "Find n.", "Solution": "…", "Answer": 73},
    "MathArena": {"problem_idx": 1, "problem": "Find n.", "answer": 73},
}


@pytest.mark.parametrize("publisher", AIME)
def test_aime_is_read_in_the_schema_of_each_publisher(tmp_path: Path, publisher: str) -> None:
    data = rg.data.aime(write(tmp_path / "aime.parquet", [AIME[publisher]]), instruction="Think.")
    assert list(data) == [{"prompt": [{"role": "user", "content": "Find n. Think."}], "answer": "73", "data_source": "aime"}]


def test_data_sets_of_hugging_face_are_taken_as_they_are_and_from_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [verl_row(1, extra_info={"a": {"x": 1}}), verl_row(2, extra_info={"b": {"y": 2}})]
    loaded = datasets.Dataset.from_list(rows)
    data = rg.data.rows(loaded, answer="reward_model.ground_truth")
    assert data[1] == {"prompt": rows[1]["prompt"], "answer": "3"}
    plain = datasets.Dataset.from_list([{"prompt": ASKED, "answer": "2", "tools": None}, {"prompt": ASKED, "answer": "2", "tools": None}])
    prompts = rg.prompts(plain, count=2)
    assert prompts.columns == ("prompt_texts", "prompt_messages", "prompt_ids", "answers")
    assert json.loads(prompts.node.operation.batch(0)["prompt_messages"][0])["messages"] == ASKED
    loaded.save_to_disk(str(tmp_path / "saved"))
    again = rg.data.huggingface(str(tmp_path / "saved"), answer="reward_model.ground_truth")
    assert list(again) == list(data)
    datasets.DatasetDict({"train": loaded, "test": loaded.select([0])}).save_to_disk(str(tmp_path / "both"))
    assert len(rg.data.huggingface(str(tmp_path / "both"), "test", answer="reward_model.ground_truth")) == 1


def test_pandas_rows_with_arrays_of_messages_are_conversations(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.read_parquet(write(tmp_path / "train.parquet", [verl_row(1)])).to_dict("records")
    assert type(rows[0]["prompt"]).__name__ == "ndarray"
    prompts = rg.prompts([{"prompt": row["prompt"]} for row in rows], count=1)
    assert prompts.node.operation.batch(0)["prompt_texts"] == ["1 + 1 ="]


def test_rows_are_filtered_and_mapped_and_travel_to_workers(tmp_path: Path) -> None:
    data = rg.data.verl(write(tmp_path / "train.parquet", [verl_row(n) for n in range(9)]))
    picked = data.filter(even).map(shorter)
    assert [row["answer"] for row in picked] == ["2", "4", "6", "8"]
    assert set(picked[0]) == {"prompt", "answer"}
    assert list(pickle.loads(pickle.dumps(picked))) == list(picked)
    assert len(picked.filter(lambda row: row["answer"] == "8")) == 1


def even(row: Any) -> bool:
    return int(row["answer"]) % 2 == 0


def shorter(row: Any) -> Any:
    return {name: row[name] for name in ("prompt", "answer")}


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda folder: rg.data.verl(folder / "train.parquet"), r"train.parquet': no such file"),
    "no match": (lambda folder: rg.data.jsonl(str(folder / "*.jsonl")), r"\*.jsonl': no such file"),
    "no paths": (lambda folder: rg.data.jsonl([]), "no paths are given"),
    "a number": (lambda folder: rg.data.jsonl(7), "paths"),
    "no rows": (lambda folder: rg.data.jsonl(write(folder / "a.jsonl", [])), "no rows"),
    "no parquet": (lambda folder: rg.data.parquet(write(folder / "a.json", [{}])), "cannot be read as parquet"),
    "no JSON": (lambda folder: rg.data.jsonl(broken(folder))[1], r"line 3 of '.*broken.jsonl' is not valid JSON"),
    "deep JSON": (lambda folder: rg.data.jsonl(deep(folder)), r"deep.json' is not valid JSON: maximum recursion depth"),
    "a line that is no row": (
        lambda folder: rg.data.jsonl(write(folder / "a.jsonl", [1]))[0],
        "line 1 of '.*' is 1; each line is a mapping",
    ),  # type: ignore[list-item]
    "another path": (
        lambda folder: rg.data.parquet(write(folder / "a.parquet", [verl_row(0)]), answer="reward_model.answer")[0],
        r"row 0 of '.*a.parquet' has no 'reward_model.answer': under 'reward_model' are style, ground_truth",
    ),
    "no column": (
        lambda folder: rg.data.jsonl(write(folder / "a.jsonl", [{"x": 1}]), answer="y")[0],
        "has no 'prompt': in it are x; pass the path",
    ),
    "a path that is none": (lambda folder: rg.data.rows([{"prompt": "a"}], answer=3), "answer=3 is not a path"),  # type: ignore[arg-type]
    "no verl rows": (lambda folder: rg.data.verl(write(folder / "a.jsonl", [{"prompt": "x"}]))[0], "has no 'reward_model.ground_truth'"),
    "films": (
        lambda folder: rg.data.verl(write(folder / "a.jsonl", [verl_row(1, videos=["x"])]))[0],
        "has videos; rlgraph reads text and images",
    ),
    "no messages": (lambda folder: rg.data.conversational(write(folder / "a.jsonl", [{"text": "x"}]))[0], "has the fields .*'text'"),
    "no row of GSM8K": (
        lambda folder: rg.data.gsm8k(write(folder / "a.jsonl", [{"text": "x"}]))[0],
        "row of GSM8K has 'question' and 'answer'",
    ),
    "no row of AIME": (lambda folder: rg.data.aime(write(folder / "a.jsonl", [{"text": "x"}])), "row of AIME has 'problem' and 'answer'"),
    "an answer without its mark": (
        lambda folder: rg.data.gsm8k(write(folder / "a.jsonl", [{"question": "?", "answer": "4"}]))[0],
        "ends with '#### '",
    ),
    "an answer in words": (
        lambda folder: rg.data.aime(write(folder / "a.jsonl", [{"problem": "?", "answer": "four"}])),
        "line 1 of .* has answer='four'",
    ),
    "a policy that is none": (lambda folder: rg.data.rows([{"prompt": "a"}], overlong="cut"), "overlong"),  # type: ignore[arg-type]
    "a path as rows": (lambda folder: rg.data.rows("train.jsonl"), r"read a file with rg.data.jsonl"),  # type: ignore[arg-type]
}


def deep(folder: Path) -> Path:
    file = folder / "deep.json"
    file.write_text("[" * 5000 + "]" * 5000)
    return file


def broken(folder: Path) -> Path:
    file = folder / "broken.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    return file


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_named_with_its_row(tmp_path: Path, name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(DataError, match=words):
        make(tmp_path)


def test_a_data_set_that_the_hub_does_not_give_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*given: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for read in (rg.data.huggingface, rg.data.aime):
        with pytest.raises(
            DataError, match=r"'someone/maths' \(train\) cannot be loaded: ConnectionError.*check its name, split and network"
        ):
            read("someone/maths")


def test_importing_rlgraph_and_reading_json_load_no_library_of_data(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", [verl_row(1)])
    code = (
        f"import sys, rlgraph as rg; rg.prompts(rg.data.verl({str(file)!r}), count=1); "
        "print([name for name in ('pyarrow', 'datasets', 'pandas', 'transformers', 'PIL') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_rows_of_rows_keep_what_they_are() -> None:
    data = rg.data.rows(rg.data.rows([{"q": "a", "n": {"m": 1}}], prompt="q", m="n.m"), overlong="drop", max_prompt_tokens=3)
    assert isinstance(data, Rows)
    assert data[0] == {"prompt": "a", "m": 1}
    assert (data.overlong.policy, data.overlong.most) == ("drop", 3)


def test_a_row_that_cannot_be_used_is_named_as_its_file_has_it(tmp_path: Path) -> None:
    good = {"prompt": "1 + 1 =", "answer": "2"}
    for name, rows in (("a", [good]), ("b", [good, good, {**good, "answer": None}])):
        write(tmp_path / f"{name}.jsonl", rows)
    rows = rg.data.jsonl(tmp_path / "*.jsonl").filter(lambda row: row["prompt"] != "")
    node = rg.prompts(rows, count=1).node
    with pytest.raises(DataError) as caught:
        node.operation.check(node)
    assert str(caught.value).startswith(f"line 3 of '{tmp_path / 'b.jsonl'}' has answer=None; ")
    assert "rows.filter(lambda row: row['answer'] is not None)" in str(caught.value)
