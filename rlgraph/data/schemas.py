"""Rows of published schemas: verl's, TRL's conversational one, GSM8K, DAPO-Math and AIME. From files, or from the hub by id."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlgraph.data.files import SUFFIXES, Paths, files_of, load_dataset_split, read
from rlgraph.data.images import FIELDS
from rlgraph.data.rows import Overlong, Policy, Row, Rows, at, present, present_row
from rlgraph.engines.hf.model_files import is_hub_id
from rlgraph.errors import NOT_JSON, DataError, show_value
from rlgraph.settings import Count, Name, check_arguments

STEPS = 'Let\'s think step by step and output the final answer after "####".'
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
MEDIA = ("videos", "audios")


@check_arguments(DataError)
def verl(paths: Paths, *, prompt: Name = "prompt", overlong: Policy = "error", max_prompt_tokens: Count | None = None) -> Rows:
    """Read data as verl has it, as it is: parquet or JSON files with messages under `prompt` and `reward_model.ground_truth`.

    >>> import json, pathlib, tempfile, rlgraph as rg
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "train.jsonl"
    >>> row = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "reward_model": {"ground_truth": 2}, "data_source": "sums"}
    >>> _ = path.write_text(json.dumps(row))
    >>> rg.data.verl(path, overlong="drop", max_prompt_tokens=1024)[0]
    {'prompt': [{'role': 'user', 'content': '1 + 1 ='}], 'answer': '2', 'data_source': 'sums'}

    A row has the `prompt`, the ground truth as the text `answer`, `data_source` and, where rows have them, `ability`, `agent_name`,
    `extra_info.index` as the text `index`, `extra_info` as JSON, and `images`. Raises DataError for rows of another schema, and for
    `videos` and `audios`.
    """
    rows = read(paths, overlong=overlong, max_prompt_tokens=max_prompt_tokens)
    return rows.map(_Verl(prompt, _optional(rows[0])))


class _Verl:
    """Converts rows of verl's schema. All rows get the fields of the first one; a text that a row lacks is empty."""

    def __init__(self, prompt: str, optional: tuple[str, ...]) -> None:
        self.prompt, self.optional = prompt, optional

    def __call__(self, row: Row) -> Row:
        media = [name for name in MEDIA if row.get(name)]
        if media:
            raise DataError(f"has {media[0]}; rlgraph reads text and images; leave the row out")
        made = {"prompt": at(row, self.prompt), "answer": as_text(at(row, "reward_model.ground_truth"))}
        made |= {name: as_text(row.get(name)) for name in self.optional if name != "index"}
        if "index" in self.optional:
            made["index"] = as_text(_mapping(row.get("extra_info")).get("index"))
        return made | ({"images": row["images"]} if "images" in row else {})


def _optional(first: Row) -> tuple[str, ...]:
    here = tuple(name for name in ("data_source", "ability", "agent_name", "extra_info") if first.get(name) is not None)
    return (*here, "index") if _mapping(first.get("extra_info")).get("index") is not None else here


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except NOT_JSON:
            return {}
    return value if isinstance(value, Mapping) else {}


def as_text(value: Any) -> str:
    """Write a value as text: text as it is, None as no text, anything else as JSON.

    >>> as_text("073"), as_text(73), as_text(None), as_text({"a": [1]})
    ('073', '73', '', '{"a": [1]}')
    """
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(present(value), ensure_ascii=False, default=str)


@check_arguments(DataError)
def conversational(paths: Paths | Rows, *, overlong: Policy = "error", max_prompt_tokens: Count | None = None) -> Rows:
    """Read data in TRL's formats: rows with `prompt`, with `prompt` and `completion`, or with `messages`, as text or as messages.

    >>> import json, pathlib, tempfile, rlgraph as rg
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "train.jsonl"
    >>> messages = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    >>> _ = path.write_text(json.dumps({"messages": messages}))
    >>> rg.data.conversational(path)[0]
    {'prompt': [{'role': 'user', 'content': '1 + 1 ='}], 'answer': '2'}

    `paths` may also be rows that are read already, whose own `overlong` then counts. A row has the `prompt` and, as the text `answer`,
    the completion, or the last message of the assistant, which leaves the prompt.
    `tools` (a list or its JSON) and `chat_template_kwargs` go to the chat template. `images` and `image` stay as they are, and other
    fields that are neither text nor numbers become JSON. Raises DataError for rows of another schema.
    """
    rows = paths if isinstance(paths, Rows) else read(paths, overlong=overlong, max_prompt_tokens=max_prompt_tokens)
    return rows.map(conversational_row)


def conversational_row(row: Row) -> Row:
    """Convert a row of one of TRL's formats."""
    made = {name: _field(value) for name, value in row.items() if name not in ("prompt", "completion", "messages", "tools", *FIELDS)}
    made |= {name: row[name] for name in ("tools", "chat_template_kwargs", *FIELDS) if name in row}
    if "prompt" in row:
        answer = {"answer": _completion_text(row["completion"])} if "completion" in row else {}
        return {"prompt": row["prompt"], **answer, **made}
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"has the fields {show_value(list(row))}; a row of TRL's formats has 'prompt', or 'messages'")
    answered = messages[-1].get("role") == "assistant"
    return {"prompt": messages[:-1] if answered else messages, "answer": _completion_text(messages[-1:]) if answered else "", **made}


def _field(value: Any) -> Any:
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else as_text(value)


def _completion_text(completion: Any) -> str:
    """Take the text of a completion: text, or messages of the assistant."""
    return completion if isinstance(completion, str) else "\n".join(as_text(message.get("content")) for message in completion or ())


@check_arguments(DataError)
def gsm8k(
    source: Paths = "openai/gsm8k",
    split: Name = "train",
    *,
    instruction: str = STEPS,
    overlong: Policy = "error",
    max_prompt_tokens: Count | None = None,
) -> Rows:
    """Read GSM8K, grade-school mathematics: from files, a folder of them, or its hub id. `instruction` follows each question.

    >>> import json, pathlib, tempfile, rlgraph as rg
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "test.jsonl").write_text(json.dumps({"question": "1000 + 1 =", "answer": "Add one. #### 1,001"}))
    >>> rg.data.gsm8k(folder, "test", instruction="Answer briefly.")[0]
    {'prompt': [{'role': 'user', 'content': '1000 + 1 = Answer briefly.'}], 'answer': '1001', 'data_source': 'openai/gsm8k'}

    A row has the `prompt` as a message, and as `answer` the number after "####", without commas. Files in verl's schema are read as
    they are. Raises DataError for rows of another schema.
    """
    return _problems(source, split, "main", _Gsm8k(instruction), overlong, max_prompt_tokens)


class _Gsm8k:
    def __init__(self, instruction: str) -> None:
        self.instruction = instruction

    def __call__(self, row: Row) -> Row:
        require(row, "GSM8K", "question", "answer")
        solution = str(row["answer"])
        if "####" not in solution:
            raise DataError(f"has answer={show_value(solution)}; an answer of GSM8K ends with '#### ' and a number")
        answer = solution.rpartition("####")[2].strip().replace(",", "")
        return {"prompt": question_message(row["question"], self.instruction), "answer": answer, "data_source": "openai/gsm8k"}


def require(row: Row, schema: str, *fields: str) -> None:
    """Raise DataError unless a row has the fields of a published schema."""
    if not all(field in row for field in fields):
        raise DataError(
            f"has the fields {show_value(list(row))}; a row of {schema} has {' and '.join(map(repr, fields))}, or verl's schema"
        )


def question_message(question: str, instruction: str) -> list[dict[str, str]]:
    """Make the message of a question with an instruction."""
    return [{"role": "user", "content": f"{question} {instruction}".rstrip()}]


@check_arguments(DataError)
def dapo_math(
    source: Paths = "BytedTsinghua-SIA/DAPO-Math-17k",
    split: Name = "train",
    *,
    overlong: Policy = "error",
    max_prompt_tokens: Count | None = None,
) -> Rows:
    """Read DAPO-Math-17k: from files or its hub id. Its copies of a prompt, about a hundred each, become one row.

    >>> import json, pathlib, tempfile, rlgraph as rg
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "dapo-math-17k.jsonl"
    >>> row = json.dumps({"prompt": [{"role": "user", "content": "1 + 1 ="}], "reward_model": {"ground_truth": "2"}})
    >>> _ = path.write_text(f"{row}\\n{row}\\n")
    >>> len(rg.data.dapo_math(path, overlong="drop", max_prompt_tokens=2048))
    1

    Rows have the fields of `rg.data.verl`. Raises DataError for rows of another schema.
    """
    return _problems(source, split, None, None, overlong, max_prompt_tokens).distinct()


@check_arguments(DataError)
def aime(
    source: Paths = "HuggingFaceH4/aime_2024",
    split: Name = "train",
    *,
    instruction: str = BOXED,
    overlong: Policy = "error",
    max_prompt_tokens: Count | None = None,
) -> Rows:
    """Read problems of AIME in any of their published schemas: from files or a hub id. `instruction` follows each problem.

    >>> import pathlib, tempfile, rlgraph as rg
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "aime-2024.jsonl"
    >>> _ = path.write_text('{"Problem": "What is 16 + 17?", "Answer": "033"}')
    >>> rg.data.aime(path, instruction="")[0]
    {'prompt': [{'role': 'user', 'content': 'What is 16 + 17?'}], 'answer': '33', 'data_source': 'aime'}

    A row has the `prompt` as a message, and the whole number as `answer`, without zeros in front. Files in verl's schema keep their
    prompts; their 32 copies of a problem become one row: give `samples=32` to `rg.evaluate`. Raises DataError for other schemas.
    """
    return _problems(source, split, None, _Aime(instruction), overlong, max_prompt_tokens).distinct()


class _Aime:
    def __init__(self, instruction: str) -> None:
        self.instruction = instruction

    def __call__(self, row: Row) -> Row:
        lower = {name.lower(): value for name, value in row.items()}
        require(lower, "AIME", "problem", "answer")
        answer = str(lower["answer"]).strip()
        if not answer.isdigit():
            raise DataError(f"has answer={show_value(answer)}; an answer of AIME is a whole number of 0 to 999")
        return {"prompt": question_message(lower["problem"], self.instruction), "answer": str(int(answer)), "data_source": "aime"}


def _problems(
    source: Paths, split: str, config: str | None, convert: Callable[[Row], Row] | None, overlong: Policy, most: int | None
) -> Rows:
    """Read files, or a data set of the hub, in verl's schema or, by `convert`, in the publisher's."""
    if isinstance(source, str) and is_hub_id(source):
        rows = Rows(load_dataset_split(source, split, config, None), f"'{source}'", (present_row,), overlong=Overlong(overlong, most))
    else:
        rows = read(_split_files(source, split), overlong=overlong, max_prompt_tokens=most)
    first = rows[0]
    if convert is None or "reward_model" in first:
        return rows.map(_Verl("prompt", _optional(first)))
    return rows.map(convert)


def _split_files(source: Paths, split: str) -> Paths:
    """Choose the files of a split in a folder, by their names; all of them where no name has it."""
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return source
    below = [file for file in sorted(Path(source).rglob("*")) if file.suffix in SUFFIXES]
    return [file for file in below if file.stem.startswith(split)] or below or files_of(source, SUFFIXES)
