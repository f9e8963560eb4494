"""The page on extending: its four examples run together, and none of them needs a change of the library."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import files_channel, forked_workers, user_mistakes  # noqa: F401 (a way of dispatch)
from support.tiny import tiny_llama

import rlgraph as rg
from rlgraph import notices
from rlgraph.channels.api import TRANSPORTS, Transport, register
from rlgraph.engines import registry
from rlgraph.errors import ChannelError
from rlgraph.plan.channels import with_transport
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.measure import NO_STEP, Step

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "developers" / "extending.md").read_text()
BLOCKS = re.findall(r"(?:<!-- from (\S+) -->\n)?```python\n(.*?)```", PAGE, re.S)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget at the end what was registered."""
    known = dict(TRANSPORTS)
    for table in (registry.ENGINES, registry.TRAINERS):
        monkeypatch.setattr(table, "_known", dict(table._known))
    yield
    for name in TRANSPORTS.keys() - known:
        del TRANSPORTS[name]  # type: ignore[attr-defined]


def bits(step: Step) -> dict[str, float]:
    return {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}


@pytest.mark.usefixtures("tables")
def test_the_four_examples_run_in_one_job_and_go_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the page makes its model
    page: dict[str, Any] = {"__name__": "__main__"}  # as a program of a user's own
    exec("".join(code for file, code in BLOCKS if not file), page)
    plan: rg.Plan = page["plan"]
    assert isinstance(plan.source, rg.Graph)
    with plan.run_here() as here:
        whole = [bits(step) for step in here.steps(6)]
    assert [step["responses/seen"] for step in whole] == [16.0 * n for n in range(1, 7)]
    assert whole[-1]["steps"] == 6

    through_files, found = with_transport(plan, "files"), []
    assert {channel.transport for channel in through_files.channels} == {"files", "local"}
    assert {loop.transport for loop in through_files.loops} == {"files"}
    for steps in (2, 6):  # of the run as a whole
        with Job(plan.source, through_files, dispatch_name="forked", deadline_s=60.0, recovery=Recovery(tmp_path / "saved", 2, 2)) as job:
            found += [bits(step) for step in job.steps(steps)]
    assert found == whole


def statements(source: str) -> list[str]:
    """What a text of Python says, whatever its layout; of a class, what is in it, as a page may leave methods out."""
    body = ast.parse(source).body
    return [ast.dump(said) for top in body for said in (top.body if isinstance(top, ast.ClassDef) else [top])]


def test_what_the_page_quotes_is_in_the_files_that_it_names() -> None:
    quoted = [(file, code) for file, code in BLOCKS if file]
    assert {file for file, _ in quoted} == {"tests/support/unigram.py", "tests/support/files_channel.py"}
    for file, code in quoted:
        said = {ast.dump(node) for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.stmt)}
        assert [line for line in statements(code) if line not in said] == [], file


def test_each_example_is_one_file_and_the_program_that_names_it() -> None:
    """The library's own files know none of them, and each file knows no other of the tests."""
    library = [path for path in (ROOT / "rlgraph").rglob("*.py") if re.search(r"unigram|files_channel|OddTokens", path.read_text())]
    assert library == []
    for file in ("unigram", "files_channel"):
        source = (ROOT / "tests" / "support" / f"{file}.py").read_text()
        assert not re.search(r"^(?:from|import) (?:support|programs)\b", source, re.M)


@pytest.mark.usefixtures("tables")
def test_a_transport_has_a_name_of_its_own() -> None:
    register(files_channel.FILES)
    register(files_channel.FILES)
    with pytest.raises(ChannelError, match="transport 'shm' exists already"):
        register(Transport("shm", "support.files_channel", "host", writer_keeps="host"))
    assert TRANSPORTS["shm"].module == "rlgraph.channels.host.channel"


def test_a_loss_and_an_estimator_of_ones_own_train_as_the_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs/algorithms.md").read_text().partition("## Custom losses and estimators")[2]
    shown: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], shown)
    graph = user_mistakes.graph(tiny_llama(tmp_path), estimator=shown["Centred"](), loss=shown["PlainLoss"](), reward=lengths)
    with rg.compile(graph, rg.Cluster(cpus=2)).run_here() as job:
        (step,) = job.steps(1)
    assert math.isfinite(step.metrics["actor/pg_loss"])
    assert step.metrics["actor/grad_norm"] > 0


def test_a_job_whose_steps_are_not_iterated_says_so(caplog: pytest.LogCaptureFixture) -> None:
    node = rg.node(reads="prompt_ids", writes="rewards")(lambda batch: {"rewards": batch["prompt_ids"].float()})  # type: ignore[union-attr]
    plan = rg.compile(rg.Graph("g", node(rg.prompts([{"prompt": "1"}], 1), name="score")), rg.Cluster(cpus=1))
    notices.here.forget()
    for take in (list, lambda steps: None):
        with plan.run_here() as job:
            take(job.steps(1))
    assert [text for text in caplog.messages if "took no step" in text] == [NO_STEP]


def lengths(responses: list[str]) -> list[float]:
    return [float(place) for place, _ in enumerate(responses)]
