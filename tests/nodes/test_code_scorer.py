"""Code that is scored by its tests, and code that would rather not be."""

import asyncio
import json
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.errors import DataError, GraphError, RlgraphError
from rlgraph.nodes import sandbox
from rlgraph.nodes.base import Context
from rlgraph.nodes.environments.messages import qwen3_coder
from rlgraph.nodes.rewards.code import cases_of, code_in
from rlgraph.nodes.rewards.reward import Reward
from rlgraph.nodes.rewards.scorers import answer_in

PAIRS = [{"input": "2", "output": "4"}, {"input": "-1\n", "output": "-2\n"}, {"input": "0", "output": "0"}]
ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2", "assert double(0) == 0"]
RIGHT = "print(2 * int(input()))"
FUNCTION = "def double(x):\n    return 2 * x"


def scores(responses: list[str], tests: Any, **settings: Any) -> list[float]:
    @rg.node(reads="prompt_texts", writes="responses group_ids")
    def rollout(batch: rg.Columns) -> rg.Columns:
        raise AssertionError("never run")

    given = tests if isinstance(tests, str) else json.dumps(tests)
    prompts = rg.prompts([{"prompt": "?", "tests": given}], count=1)
    settings = {"seconds": 10.0, "memory_bytes": 1 << 29, **settings}
    operation = rg.reward(rg.scorers.code(**settings), prompts, rollout(prompts)).node.operation
    assert isinstance(operation, Reward)
    operation.scoring.check()
    columns = {
        "responses": [f"Here:\n```python\n{code}\n```\n" for code in responses],
        "tests": [given] * len(responses),
        "group_ids": torch.zeros(len(responses)),
        "prompt_texts": ["?"] * len(responses),
    }
    rewards, _ = operation.start(Context())(0, columns)  # type: ignore[misc]
    return rewards["rewards"].tolist()  # type: ignore[no-any-return, union-attr]


@pytest.mark.sandbox
@pytest.mark.parametrize(("worth", "half"), [("all", 0.0), ("share", 1 / 3)])
def test_pairs_and_assertions_are_scored_as_all_or_as_a_share(worth: str, half: float) -> None:
    programs = [RIGHT, "print(3 * int(input()))", "print(0)", "this is no code"]
    assert scores(programs, PAIRS, score=worth) == pytest.approx([1.0, half, half, 0.0])
    functions = [FUNCTION, "def double(x): return 0", "def other(x): return 2 * x"]
    assert scores(functions, ASSERTS, score=worth) == pytest.approx([1.0, half, 0.0])


@pytest.mark.sandbox
def test_input_is_a_real_one_and_stderr_is_no_output() -> None:
    programs = [
        "import sys; print(2 * int(sys.stdin.readline()), end='   \\n\\n')",
        "print(2 * int(open(0).read()))",
        "import os; print(2 * int(os.read(0, 99)))",
        "import sys, os; print('why', file=sys.stderr); os.write(2, b'why'); print(2 * int(input()))",
        "if __name__ == '__main__':\n    print(2 * int(input()))\n    raise SystemExit(0)",
        "def f(n):\n    return n if n == 0 else f(n - 1)\nf(9)\nprint(2 * int(input()))",
    ]
    assert scores(programs, PAIRS) == [1.0] * len(programs)


HOSTILE = {
    "ends at once": "import os; os._exit(0)",
    "exits": "raise SystemExit(0)",
    "loops": "while True: pass",
    "takes memory": "x = bytearray(1 << 32)",
    "kills": "import os, signal; os.kill(os.getppid(), 9); os.kill(-1, 9)",
    "guesses the end": "print(); print('ok'); print('passed'); print('4'); import os; os._exit(0)",
    "closes its output": "import os, sys; sys.stdout.close(); os.close(1)",
    "patches": "import builtins; builtins.exec = builtins.compile = lambda *a, **k: None; raise ValueError",
    "a null character": "print('\\0' * 3)\x00",
    "surrogates": "print('\ud800')",
    "braces and quotes": "'''{code}'''; {given!r} \"\"\" \\",
}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_scores_nothing_and_harms_nobody(name: str) -> None:
    limits = {"seconds": 2.0, "memory_bytes": 1 << 28, "output_bytes": 1 << 16}
    beside = {**limits, "seconds": 4.0 if name == "loops" else 10.0}  # the right code has time enough
    assert scores([HOSTILE[name], FUNCTION], ASSERTS[:1], **beside) == [0.0, 1.0]
    assert scores([HOSTILE[name]], PAIRS[1:2], **limits) == [0.0]


def test_the_right_output_never_enters_the_process() -> None:
    sent: list[str] = []

    async def noted(program: str, *rest: Any) -> str:
        sent.append(program)
        return "UNHEARD-OF"

    scorer = rg.scorers.code()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "run", noted)
        assert asyncio.run(scorer(response=RIGHT, tests=[{"input": "2", "output": "UNHEARD-OF"}])) == 1.0
    assert sent
    assert "UNHEARD" not in sent[0]


def test_the_first_failure_ends_all_or_nothing() -> None:
    calls: list[str] = []

    async def noted(program: str, *rest: Any) -> str:
        calls.append(program)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "run", noted)
        assert asyncio.run(rg.scorers.code()(response=RIGHT, tests=PAIRS)) == 0.0
        assert len(calls) == 1
        assert asyncio.run(rg.scorers.code(score="share")(response=RIGHT, tests=PAIRS)) == pytest.approx(0.0)
        assert len(calls) == 4


def test_code_is_the_last_block_of_python_or_else_all_of_the_response() -> None:
    assert code_in("```\na\n```\nthen\n```python\nb\n```\nrun:\n```bash\nls\n```") == "b\n"
    assert code_in("```py\ncut off") == "cut off"
    assert code_in("print(1)") == "print(1)"
    assert code_in("```c\nint x;\n```") == ""


def test_the_formats_of_known_data_sets_are_read() -> None:
    pairs = cases_of(PAIRS)
    assert cases_of({"inputs": [p["input"] for p in PAIRS], "outputs": [p["output"] for p in PAIRS]}) == pairs
    assert cases_of(json.dumps(PAIRS)) == pairs
    assert cases_of({"inputs": [["1", "2"]], "outputs": [["3", ""]]})[0].given == "1\n2"
    assert cases_of({"assert_case": ASSERTS}) == cases_of(ASSERTS)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "tests", ["no json", "[]", "{}", '"text"', "3", '[{"input": "1"}]', '{"inputs": [1], "outputs": []}', '{"fn_name": "f"}']
)
def test_tests_that_are_none_end_the_run_and_name_the_response(tests: str) -> None:
    with pytest.raises(DataError, match="code: the tests of an item are"):
        cases_of(tests)
    with pytest.raises(RlgraphError, match=r"DataError: code: the tests of an item are .* for response 0"):
        scores([RIGHT], tests)


def test_settings_that_cannot_be_are_named() -> None:
    with pytest.raises(GraphError, match="score"):
        rg.scorers.code(score="some")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="seconds"):
        rg.scorers.code(seconds=0)
    with pytest.raises(GraphError, match="accept_missing"):
        rg.scorers.code(accept_missing=("namespace",))
    with pytest.raises(GraphError, match="tests is the name of a field"):
        rg.scorers.code(tests="my tests")


def test_a_sandbox_that_runs_nothing_is_an_error_and_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*given: object) -> str:
        raise sandbox.ToolError("no process could be started")

    monkeypatch.setattr(sandbox, "run", broken)
    with pytest.raises(RlgraphError, match="the sandbox cannot run an empty program: no process could be started"):
        asyncio.run(rg.scorers.code()(response="print(1)", tests='[{"input": "", "output": "1"}]'))


LONG = 1 << 20  # characters: what is quadratic in them never ends


@pytest.mark.parametrize("text", ["```" + "a" * LONG, "```" + " " * LONG, "`" * LONG, "```a\n" * (LONG // 5)])
def test_code_is_found_in_time_linear_in_the_text(text: str) -> None:
    assert len(code_in(text)) <= LONG + 3


def test_answers_and_calls_are_found_in_time_linear_in_the_text() -> None:
    assert answer_in("\\boxed{4}" + "<answer>" * (LONG // 8)) == "4"
    assert answer_in("<answer>3</answer>" + "\\boxed{" * (LONG // 7)) == "3"
    inner = "<parameter=a>1</parameter>" + "<parameter=a>" * (LONG // 13)
    for body in (inner, inner + "<parameter=" * (LONG // 11)):
        [call] = qwen3_coder(f"<tool_call><function=add>{body}</function></tool_call>", {})
        assert call.arguments == {"a": "1"}
