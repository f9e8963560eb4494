"""Published stage times give the published step times, as far as the document says, and the document says what the script does."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import forked_programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the figures and the document as the script makes them today."""
    folder = tmp_path_factory.mktemp("seed_tables")
    (folder / "doc.md").write_text((ROOT / "docs" / "developers" / "seed_tables.md").read_text())
    options = "--json", str(folder / "out.json"), "--markdown", str(folder / "doc.md")
    run = forked_programs.run(str(ROOT / "benchmarks" / "prediction" / "seed_tables.py"), *options, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((folder / "out.json").read_text()), (folder / "doc.md").read_text()


def row(figures: dict[str, Any], name: str, table: str = "") -> dict[str, Any]:
    return next(r for r in figures["rows"] if r["row"] == name and r["table"].startswith(table))


def test_the_document_and_the_results_are_those_of_the_script(made: tuple[dict[str, Any], str]) -> None:
    figures, document = made
    assert document == (ROOT / "docs" / "developers" / "seed_tables.md").read_text()
    assert figures == json.loads((ROOT / "benchmarks" / "results" / "seed_tables.json").read_text())


def test_synchronous_rows_are_the_sum_of_their_stages_and_within_eight_percent(made: tuple[dict[str, Any], str]) -> None:
    rows = [r for r in made[0]["rows"] if r["kind"] == "sync"]
    assert len(rows) == 7
    assert all(abs(r["published_s"] - r["predicted_s"]) <= 0.08 * r["published_s"] for r in rows)
    assert row(made[0], "sync, FSDP2")["predicted_s"] == 321 + 88 + 286


def test_one_step_off_rows_are_bound_by_generation_and_split_the_rest(made: tuple[dict[str, Any], str]) -> None:
    found = row(made[0], "one-step-off, FSDP2")
    assert found["predicted_s"] == 458
    assert "rollout" in found["critical"]
    assert (found["extra_wait_s"], found["in_no_stage_s"]) == (32, 30)
    assert found["published_s"] == found["predicted_s"] + found["extra_wait_s"] + found["in_no_stage_s"]
    assert found["with_sync_gap_s"] == 458 + 54


def test_the_laws_totals_follow_from_the_stage_times_that_it_needs(made: tuple[dict[str, Any], str]) -> None:
    for found in made[0]["async_rl"]:
        assert found["predicted_async_s"] == found["async_s"]
        assert found["predicted_sync_s"] in (None, found["sync_s"])
    assert [found["divides"] for found in made[0]["async_rl"]] == [0.08, 0.308, 0.077, None]
