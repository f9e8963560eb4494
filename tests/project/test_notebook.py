"""The notebook of the docs runs from its first cell to its last, in an empty folder."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.stage("recipes")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client and zmq
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = ["".join(part.get("text", "") for part in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert "staleness at most 1" in said[2]
    steps = [line for line in said[4].splitlines() if line.startswith("step ")]
    assert [line.split("reward")[0] for line in steps] == [f"step {number}: " for number in range(8)]
    assert said[5].startswith("3 plans compared on ")
    assert (tmp_path / "plan.svg").exists()
