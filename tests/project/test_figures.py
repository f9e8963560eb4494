"""Every figure of README.md and docs/ that a benchmark measured is the one in its file of results."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import figures
from benchmarks.report import pictures, rows, table

ROOT = Path(__file__).parents[2]

DECLARED = [*rows.CHANNELS, *rows.LEARNING, *rows.STAGES, *rows.ACCURATE, *rows.RELIABLE, *rows.ON_GPUS, *rows.SHOWN]
COUNTED = ("count", "items")  # figures that say how many, which a change of the numbers leaves alone


@pytest.mark.parametrize("page", table.PAGES)
def test_a_page_shows_what_the_results_hold(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    tables, _ = rows.tables()
    assert text == table.rendered(text, tables, rows.FIGURES), f"{page} differs from benchmarks/results: run benchmarks/report/table.py"


@pytest.mark.parametrize("picture", pictures.PICTURES)
def test_a_picture_shows_what_its_result_holds(picture: str) -> None:
    same = pictures.drawn(picture) == (ROOT / picture).read_text(encoding="utf-8")
    assert same, f"{picture} differs from benchmarks/results: run benchmarks/report/table.py"


def test_the_readme_has_few_rows_with_one_number_each() -> None:
    found = re.search(r"<!-- table: readme -->\n(.*?)<!-- end", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert found is not None
    lines = [line.split(" | ") for line in found[1].strip().splitlines()[2:]]
    assert len(lines) == len(rows.SHOWN) < 10
    assert not [cells for cells in lines if any(";" in cell for cell in cells)]


def test_no_row_lacks_its_result() -> None:
    _, missing = rows.tables()
    assert not missing


def test_a_step_beside_a_peer_is_the_median_of_five_or_more_of_each() -> None:
    beside = [row for row in DECLARED if row.peer.startswith(("verl", "TRL")) and row.figure.path[-1].endswith("_s")]
    steps = {
        (row.what, figure.file): figures.Figure(figure.file, (*figure.path[:-1], "steps_timed"), "{:.0f}").value()
        for row in beside
        for figure in (row.figure, row.beside)
        if figure is not None
    }
    assert steps
    assert not {key: number for key, number in steps.items() if number < 5}


def test_every_figure_follows_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(figures.RESULTS, tmp_path / "results")
    for file in (tmp_path / "results").iterdir():
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        file.write_text("\n".join(json.dumps(_changed(json.loads(line), file.name)) for line in lines))
    before = {row.what: row.cells() for row in DECLARED if not row.missing()}
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    figures._loaded.cache_clear()
    try:
        after = {row.what: row.cells() for row in DECLARED if not row.missing()}
        texts = {name: figure.text() for name, figure in rows.FIGURES.items()}
    finally:
        figures._loaded.cache_clear()
    same = [
        row.what
        for row in DECLARED
        if row.what in before and row.figure.reduce not in COUNTED and before[row.what][1] == after[row.what][1]
    ]
    assert not same
    monkeypatch.undo()
    assert not [name for name, figure in rows.FIGURES.items() if figure.text() == texts[name]]


def _changed(value: Any, file: str) -> Any:
    """Other numbers at the same places; settings by which rows are found stay."""
    if isinstance(value, dict):
        return {key: part if key == "size" else _changed(part, file) for key, part in value.items()}
    if isinstance(value, list):
        return [_changed(part, file) for part in value]
    return value * 3 + 1 if isinstance(value, int | float) and not isinstance(value, bool) else value


@pytest.mark.parametrize("file", sorted(figures.RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_results_hold_what_their_script_wrote_and_no_remarks(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert not {"note", "on_four_gpus", "engines"} & found.keys()


def test_a_figure_in_running_text_is_replaced_and_one_that_is_not_declared_is_an_error() -> None:
    figure = rows.FIGURES["two-gpus-gap"]
    assert table.rendered("It stops for 7 ms <!-- figure: two-gpus-gap --> then.", {}, rows.FIGURES) == (
        f"It stops for {figure.text()} <!-- figure: two-gpus-gap --> then."
    )
    with pytest.raises(KeyError):
        table.rendered("7 ms <!-- figure: nobody -->", {}, rows.FIGURES)


UNIT = r"(?:%|ms|µs|GB/s|s|times|tokens/s)"
MEASURED = re.compile(rf"(?<![\w.])\d[\d,.]*\d? ?{UNIT}(?!\w)|(?<![\w.])0\.\d+(?![.\d])")
PROMISED = ("5 s",)  # a bound that tests hold, no measurement


def test_a_figure_of_the_readme_stands_in_its_table_or_has_its_result_named() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = table.TABLE.sub("", re.sub(r"```.*?```", "", text, flags=re.S))
    named = {figure.text() for figure in rows.FIGURES.values()}
    found = [match[0] for match in MEASURED.finditer(prose)]
    assert not [figure for figure in found if figure not in (*PROMISED, *named)], "add <!-- figure: name --> from rows.py"
