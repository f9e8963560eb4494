"""Streams: rows are drawn in their order, each once, checked as they come, and a job that was killed goes on after the last one."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked_programs
from support.paths import PROGRAMS
from support.templates import model_with

import rlgraph as rg
from rlgraph.data.streams import StreamReader
from rlgraph.errors import DataError, GraphError
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import Context

datasets = pytest.importorskip("datasets")
from programs import stream_driver  # noqa: E402

DRIVER = PROGRAMS / "stream_driver.py"


def sums() -> Iterator[dict[str, Any]]:
    for a in range(10):
        yield {"prompt": f"{a} + 1 =", "answer": str(a + 1)}


def by_epoch(epoch: int) -> Iterator[dict[str, Any]]:
    for a in range(3):
        yield {"prompt": f"{epoch}.{a}"}


def stage_of(prompts: Output) -> Any:
    return prompts.node.operation.start(Context())


def texts(stage: Any, steps: int) -> list[str]:
    return [text for step in range(steps) for text in stage(step, {})[0]["prompt_texts"]]


def iterable(rows: int = 40, shards: int = 3) -> Any:
    return datasets.Dataset.from_list([{"prompt": f"row {n}", "n": n} for n in range(rows)]).to_iterable_dataset(num_shards=shards)


STREAMS: dict[str, Any] = {
    "a function": lambda: sums,
    "a function of the epoch": lambda: by_epoch,
    "filtered and mapped": lambda: rg.data.stream(sums).filter(lambda row: "3" not in row["prompt"]).map(lambda row: {**row, "more": 1}),
    "an IterableDataset": iterable,
    "in batches": lambda: iterable().map(lambda rows: {"prompt": [p + "!" for p in rows["prompt"]]}, batched=True, batch_size=7),
    "filtered by datasets": lambda: iterable().filter(lambda row: row["n"] % 3 != 1),
    "shuffled in a buffer": lambda: iterable().shuffle(seed=3, buffer_size=8),
    "interleaved": lambda: datasets.interleave_datasets([iterable(20, 1), iterable(20, 2)], probabilities=[0.3, 0.7], seed=5),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("stopped", [0, 1, 4, 9])
def test_a_stage_that_goes_on_from_its_state_draws_what_one_without_a_stop_does(kind: str, stopped: int) -> None:
    make = STREAMS[kind]
    whole = texts(stage_of(rg.prompts(make(), count=3)), 20)
    first = stage_of(rg.prompts(make(), count=3))
    found = texts(first, stopped)
    state = json.loads(json.dumps(first.state()))
    second = stage_of(rg.prompts(make(), count=3))
    second.load_state(state)
    found += texts(second, 20 - stopped)
    assert found == whole
    assert second.state() == json.loads(json.dumps(second.state()))


def test_every_row_comes_once_an_epoch_in_the_order_of_the_stream() -> None:
    stage = stage_of(rg.prompts(sums, count=5))
    (first, metrics), (second, _) = stage(0, {}), stage(1, {})
    assert first["prompt_texts"] + second["prompt_texts"] == [f"{a} + 1 =" for a in range(10)]
    assert second["prompt_ids"].tolist() == [5, 6, 7, 8, 9]
    assert second["answers"] == ["6", "7", "8", "9", "10"]
    assert metrics == {"data/rows": 5.0}
    assert texts(stage_of(rg.prompts(by_epoch, count=2)), 3) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


def test_the_state_of_an_iterable_data_set_spares_reading_it_again_and_a_buffer_is_read_again() -> None:
    read: list[int] = []

    def noted(row: Any) -> Any:
        read.append(row["n"])
        return row

    for shuffled in (False, True):
        rows = iterable(30, 1).map(noted)
        rows = rows.shuffle(seed=1, buffer_size=4) if shuffled else rows
        stage = stage_of(rg.prompts(rows, count=4))
        texts(stage, 3)
        again = stage_of(rg.prompts(rows, count=4))
        read.clear()
        again.load_state(stage.state())
        texts(again, 1)
        assert (min(read) == 0) is shuffled


def test_a_stream_that_changed_since_the_checkpoint_is_refused() -> None:
    stage = stage_of(rg.prompts(sums, count=3))
    texts(stage, 2)

    def others() -> Iterator[dict[str, Any]]:
        for row in sums():
            yield {**row, "prompt": row["prompt"].replace("5", "6")}

    with pytest.raises(DataError, match=r"row 5 of the stream has changed since the checkpoint"):
        stage_of(rg.prompts(others, count=3)).load_state(stage.state())


def bad(**fields: Any) -> Any:
    def rows() -> Iterator[dict[str, Any]]:
        for number in range(9):
            yield {"prompt": "1 + 1 =", "answer": "2"} | (fields if number == 4 else {})

    return rows


def test_rows_are_checked_as_they_come_with_their_number() -> None:
    for fields, words in (({"answer": 3}, "item 4 .* has answer=3, a whole number"), ({"prompt": None}, "item 4 .* has prompt=None")):
        stage = stage_of(rg.prompts(bad(**fields), count=2))
        texts(stage, 2)
        with pytest.raises(DataError, match=words):
            stage(2, {})
    with pytest.raises(DataError, match=r"row 0 of the stream has no 'answer.text'"):
        rg.prompts(rg.data.stream(bad(), answer="answer.text"), count=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5")


SIZES = [3, 9, 4, 12, 5, 8]


def sized() -> Iterator[dict[str, Any]]:
    for n, size in enumerate(SIZES):
        yield {"prompt": chr(ord("a") + n) * size}


def launched(folder: Path, data: Any) -> Output:
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=12, sampling=rg.Sampling(max_tokens=4))
    prompts = rg.prompts(data, count=2)
    rollout = generator.rollout(prompts).node
    for node in (prompts.node, rollout):
        node.operation.check(node)
    return prompts


def test_long_prompts_of_a_stream_are_dropped_cut_off_or_an_error_as_they_come(folder: Path) -> None:
    stage = stage_of(launched(folder, rg.data.stream(sized, overlong="drop")))
    assert texts(stage, 3) == ["aaa", "cccc", "eeeee", "ffffffff", "aaa", "cccc"]
    assert stage(3, {})[1] == {"data/rows": 12.0, "data/overlong_prompts": 4.0}
    stage = stage_of(launched(folder, rg.data.stream(sized, overlong="truncate_left")))
    assert len(texts(stage, 3)[1]) == 9
    assert stage.overlong == 2
    stage = stage_of(launched(folder, sized))
    with pytest.raises(DataError, match=r"row 1 of the stream has a prompt of 9 tokens, but node 'rollout' has room for 1 to 8"):
        stage(0, {})
    with pytest.raises(DataError, match="no prompt of epoch 1 of the stream is short enough"):
        texts(stage_of(launched(folder, rg.data.stream(sized, overlong="drop", max_prompt_tokens=2))), 1)


def test_conversations_of_a_stream_are_checked_against_the_template_at_the_launch_and_as_they_come(folder: Path) -> None:
    def talks() -> Iterator[dict[str, Any]]:
        for n in range(3):
            yield {"prompt": [{"role": "user", "content": str(n)}], "tools": None} | ({"chat_template_kwargs": {"x": 1}} if n == 2 else {})

    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=400, sampling=rg.Sampling(max_tokens=4))
    prompts = rg.prompts(talks, count=1)
    rollout = generator.rollout(prompts).node
    rollout.operation.check(rollout)
    stage = stage_of(prompts)
    assert texts(stage, 2) == ["0", "1"]
    with pytest.raises(DataError, match=r"item 2 .* gives 'x' to the chat template"):
        stage(2, {})
    wrong = rg.prompts(talks, count=1, chat=rg.options.Chat(enable_thinking=True))
    rollout = generator.rollout(wrong, name="other").node
    with pytest.raises(DataError, match=r"item 0 .* gives 'enable_thinking'"):
        rollout.operation.check(rollout)


def test_what_a_stream_cannot_do_is_an_error_that_says_so(folder: Path) -> None:
    generator, weights = rg.Generator(str(folder), pool=rg.Pool("rollout")), rg.feedback("weights", depth=1)
    prompts = rg.prompts(sums, count=2)
    with pytest.raises(GraphError, match="read a stream into"):
        generator.rollout(prompts, weights, continuous=True)
    with pytest.raises(GraphError, match=r"or a stream; pass rg.prompts"):
        generator.rollout(prompts, weights, group_size=2, refill=rg.options.Refill(reward=lambda response: 0.0))
    with pytest.raises(DataError, match="evaluates on a stream"):
        rg.evaluate(generator, sums, weights, reward=lambda response: 0.0, every=1)
    with pytest.raises(DataError, match="seed=3 has no effect on a stream"):
        rg.prompts(sums, count=2, seed=3)
    with pytest.raises(DataError, match="can be read only once; pass the function that makes it"):
        rg.data.stream(sums())
    with pytest.raises(DataError, match=r"a stream is a datasets.IterableDataset, or a function"):
        rg.data.stream(7)
    with pytest.raises(DataError, match=r"epoch 0 of the stream has 0 rows"):
        rg.prompts(lambda: iter([]), count=1)
    with pytest.raises(DataError, match="row 0 of the stream is 'a'"):
        rg.prompts(lambda: iter(["a"]), count=1)


def test_a_reader_counts_rows_that_are_left_out() -> None:
    reader = StreamReader(rg.data.stream(sums).filter(lambda row: int(row["answer"]) % 5 == 0))
    assert [next(reader)[0] for _ in range(3)] == [4, 9, 14]


@pytest.mark.stage("kills")
@pytest.mark.parametrize("kind", ["function", "iterable", "shuffled"])
def test_a_program_that_is_killed_draws_every_row_exactly_once(kind: str, tmp_path: Path) -> None:
    """Two kills in the middle of a run, with a checkpoint at every third step; compared with the rows as the stream itself gives them."""
    for kill_at in (5, 10, None):
        with forked_programs.Program(str(DRIVER), kind, str(tmp_path), "14" if kill_at is None else "1000", cwd=tmp_path) as program:
            for line in program.stdout:
                if int(line) == kill_at:
                    os.kill(program.pid, signal.SIGKILL)
            ended = program.end()
        assert ended.returncode == (0 if kill_at is None else -signal.SIGKILL), ended.stderr
    did = [json.loads(line) for line in (tmp_path / "drawn.jsonl").read_text().splitlines()]
    steps = {row["step"]: row["texts"] for row in did}
    assert len(did) > len(steps), "steps after a checkpoint were done again"
    assert all(steps[row["step"]] == row["texts"] for row in did), "with the same rows"
    whole = [text for epoch in range(2) for text in epoch_of(kind, epoch)]
    assert [text for step in range(14) for text in steps[step]] == whole[: 14 * stream_driver.COUNT]


def epoch_of(kind: str, epoch: int) -> list[str]:
    """The rows of an epoch, as the stream itself gives them."""
    stream = stream_driver.data(kind)
    if kind != "function":
        stream.set_epoch(epoch)
    return [row["prompt"] for row in (stream() if kind == "function" else stream)]
