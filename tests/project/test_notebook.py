"""The notebook of the docs runs from its first cell to its last, in an empty folder, and so does a job over several cells."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.stage("recipes")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


FAILS = {"tags": ["raises-exception"]}
CELLS = (
    ("rg.prompts([], count=2)", FAILS),
    ("job = plan.launch().start()\npids = job.pids.values()", {}),
    ("print(next(job.steps(1)).index)", {}),
    (
        "import os, signal\nfor step in job.steps(50):\n    print(step.index)\n"
        "    if step.index == 3:\n        signal.raise_signal(signal.SIGINT)  # as the button that stops a cell",
        FAILS,
    ),
    ("print([step.index for step in job.steps(2)])", {}),
    ("for step in rg.record(job, 1, 'recorded'): print(step.index)", {}),
    ("job.close()\nprint([pid for pid in pids if os.path.exists(f'/proc/{pid}')])", {}),
)


def streams(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def error(cell: Any) -> str:
    [found] = [output for output in cell.outputs if output.output_type == "error"]
    return "\n".join(found.traceback)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Any]]:
    """The folder and the cells of code, after one kernel ran the notebook and then the cells of this file."""
    folder, notebook = tmp_path_factory.mktemp("notebook"), nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(code, metadata=metadata) for code, metadata in CELLS]
    NotebookClient(notebook, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return folder, [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client and zmq
def test_the_notebook_runs(ran: tuple[Path, Sequence[Any]]) -> None:
    folder, cells = ran
    said = [streams(cell) for cell in cells]
    assert "staleness at most 1" in said[2]
    steps = [line for line in said[4].splitlines() if line.startswith("step ")]
    assert [line.split("reward")[0] for line in steps] == [f"step {number}: " for number in range(8)]
    assert said[5].startswith("3 plans compared on ")
    assert (folder / "plan.svg").exists()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_job_lives_over_several_cells_and_an_interrupted_one(ran: tuple[Path, Sequence[Any]]) -> None:
    cells = ran[1][-len(CELLS) :]
    assert "rg.prompts([], count=2)" in error(cells[0])
    assert error(cells[0]).endswith("rlgraph.errors.DataError: prompts: the data set is empty; it needs at least one item")
    assert "items.py" not in error(cells[0])
    assert "starting workers: " in streams(cells[1])
    assert "\x1b" not in streams(cells[1])  # no animation, of which a notebook would keep every frame
    assert not [output for cell in (cells[1], cells[5]) for output in cell.outputs if output.output_type != "stream"]
    assert streams(cells[2]) == "0\n"
    assert streams(cells[3]).split() == ["1", "2", "3"]
    assert "KeyboardInterrupt" in error(cells[3])
    assert streams(cells[4]) == "[4, 5]\n"
    assert "  reward " in streams(cells[5])
    assert streams(cells[6]) == "[]\n"
