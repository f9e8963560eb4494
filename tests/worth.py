"""Show what the quick tests are worth: which test notices a planted fault, and which lines only one file of tests reaches.

* `python tests/worth.py faults [NAME ...]` plants each fault of `planted_faults.jsonl` in a copy of the checkout, and prints the first
  test that fails: of the fault's own tests, else of those that reach it. Names are those of faults or of modules.
* `python tests/worth.py coverage [PATH ...]` measures tests, keeps the result in `build/worth`, and prints the table of all that is there.

Neither runs a test with the marker `ray` or `vllm`.
"""

import argparse
import ast
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_name("planted_faults.jsonl")
KEPT = ROOT / "build" / "worth"
DATA = KEPT / "coverage"
PYTEST = ["-P", "-m", "pytest", "-p", "worth", "-p", "no:cacheprovider", "-q", "--stage=quick", "-m", "not ray and not vllm"]
SETTINGS = f"[run]\nbranch = True\nparallel = True\ndata_file = {DATA}\nsource = {ROOT}/rlgraph\npatch = _exit, fork, subprocess\n"


# The plugin of the runs: it writes what each test took, and names the file that runs as coverage's context.
def switch(path: Path) -> None:
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()):
        name = str(path.relative_to(ROOT))
        if measured.config.context != name:
            measured.switch_context(name)
            measured.config.context = name  # of the processes that it starts
            os.environ["COVERAGE_PROCESS_CONFIG"] = measured.config.serialize()
            forkserver._forkserver._stop()  # its context is that of the file that started it


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        switch(collector.path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    switch(item.path)


def pytest_runtest_logreport(report: Any) -> None:
    if "WORTH_RECORD" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["WORTH_RECORD"]).open("a") as record:
            record.write(json.dumps([report.nodeid, report.when, round(report.duration, 3), report.outcome]) + "\n")


def records(path: Path) -> list[tuple[str, str, float, str]]:
    """Read what each part of a test took, and how it ended."""
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


# Planted faults.
def planted() -> list[dict[str, Any]]:
    """Read the faults: the text to replace, and the tests that should notice first."""
    return [json.loads(line) for line in FAULTS.read_text().splitlines()]


def stale() -> list[str]:
    """Name the faults whose old text is no longer in its file exactly once."""
    found = [(fault, (ROOT / fault["file"]).read_text().count(fault["old"])) for fault in planted()]
    return [f"{fault['name']}: its old text is {n} times in {fault['file']}, not once" for fault, n in found if n != 1]


def copy(folder: Path) -> Path:
    """Copy what the tests need of the checkout, with what Python compiled of it. The environments are links."""
    left_out = shutil.ignore_patterns(".*", "runs", "build", "site", "mlruns")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    for environment in ROOT.glob(".venv*"):
        (folder / environment.name).symlink_to(environment.resolve())
    return folder


def first_failure(folder: Path, tests: list[str], *options: str) -> list[str]:
    """Run tests in a copy of the checkout, and name those that failed."""
    record = folder / "record.jsonl"
    record.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{folder}/tests", "WORTH_RECORD": str(record), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *PYTEST, "-o", "timeout=60", *options, *tests]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [name for name, _, _, outcome in records(record) if outcome == "failed"]
    if not failed and ran.returncode not in (0, 5):  # 5: no test of quick there
        failed = [(ran.stdout + ran.stderr).strip().splitlines()[-1]]
    return failed


def reach(fault: dict[str, Any]) -> list[str]:
    """List the files of tests that reach the fault, by the coverage that was measured; all tests if that does not tell."""
    before, _ = (ROOT / fault["file"]).read_text().split(fault["old"])
    first = before.count("\n") + 1
    lines = set(range(first, first + fault["old"].count("\n") + 1)) & bodies(ROOT / fault["file"])
    moves = arcs()
    files = {test for (_, to), tests in moves[fault["file"]].items() if to in lines for test in tests}
    return sorted(files) or ["tests"]


def notice(fault: dict[str, Any]) -> str:
    """Plant a fault in a copy of the checkout, and find the first test that fails: among its own, then among the others."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="worth-") as temporary:
        folder = copy(Path(temporary) / "rlgraph")
        module = folder / fault["file"]
        module.write_text(module.read_text().replace(fault["old"], fault["new"]))
        failed = first_failure(folder, fault["tests"], "-x")
        others = [test for test in reach(fault) if test not in fault["tests"]]
        known = [option for test in fault["tests"] for option in ("--deselect", test)]
        failed = failed or (first_failure(folder, others, "-x", *known) if others else [])
    print(f"{time.monotonic() - began:6.0f}  {fault['name']:<44}  {failed[0] if failed else 'NOTHING'}", flush=True)
    return failed[0] if failed else ""


def plant(names: list[str], at_once: int) -> str:
    """Plant the faults, and check that what noticed them passes without."""
    if gone := stale():
        return "\n".join([*gone, f"mend {FAULTS.relative_to(ROOT)}"])
    faults = [fault for fault in planted() if not names or any(name in (fault["name"], fault["file"]) for name in names)]
    print("seconds  fault, and the first test that fails")
    with ThreadPoolExecutor(at_once) as pool:
        noticed = [name for name in pool.map(notice, faults) if name]
    with tempfile.TemporaryDirectory(prefix="worth-") as temporary:
        whole = first_failure(copy(Path(temporary) / "rlgraph"), sorted({name for name in noticed if "::" in name}))
    print(f"caught {len(noticed)} of {len(faults)}")
    return "\n".join(f"{name} fails without a fault too" for name in whole)


# Coverage.
def bodies(path: Path) -> set[int]:
    """List the lines of a module that run when its functions are called: the others run once, for whoever imports it first."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def arcs() -> dict[str, dict[tuple[int, int], set[str]]]:
    """Read which files of tests went from which line to which, by module."""
    found: dict[str, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    query = "select path, fromno, tono, context from arc join file on file.id = file_id join context on context.id = context_id"
    if DATA.exists():
        with sqlite3.connect(DATA) as data:
            for path, start, end, context in data.execute(f"{query} where context != ''"):
                found[str(Path(path).relative_to(ROOT))][start, end].add(context)
    return found


def measure(paths: list[str], at_once: int) -> None:
    """Run tests with coverage, and add what they reached to what is kept."""
    KEPT.mkdir(parents=True, exist_ok=True)
    settings = KEPT / "settings"
    settings.write_text(SETTINGS)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "WORTH_RECORD": str(KEPT / "seconds.jsonl"), "OMP_NUM_THREADS": "1"}
    coverage = [sys.executable, "-m", "coverage"]
    several = ["--numprocesses", str(at_once), "--dist", "loadfile"] if at_once > 1 else []
    command = [*coverage, "run", f"--rcfile={settings}", *PYTEST[1:], *several, *paths]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    subprocess.run([*coverage, "combine", f"--rcfile={settings}", "--append", "--quiet"], cwd=ROOT, check=False)


def table() -> list[str]:
    """Lay out each file's seconds, and the lines and branches that no other file reaches, by seconds for each such line."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for (name, when), took in {(name, when): took for name, when, took, _ in records(KEPT / "seconds.jsonl")}.items():
        seconds[name.split("::")[0]] += took
        tests[name.split("::")[0]] += when == "call"
    own: dict[str, list[int]] = {name: [0, 0] for name in seconds}
    for path, moves in arcs().items():
        lines: dict[int, set[str]] = defaultdict(set)
        ends: dict[int, int] = defaultdict(int)
        for (start, end), files in moves.items():
            lines[end] |= files
            ends[start] += 1
        within = bodies(ROOT / path)
        alone = [(line, *files) for line, files in lines.items() if line in within and len(files) == 1]
        branches = [(start, *files) for (start, _), files in moves.items() if start in within and ends[start] > 1 and len(files) == 1]
        for column, found in enumerate((alone, branches)):
            for _, name in found:
                if name in own:
                    own[name][column] += 1
    rows = sorted(own, key=lambda name: -seconds[name] / (own[name][0] or 0.1))
    head = f"{'seconds':>8}{'tests':>7}{'own lines':>11}{'own branches':>14}  file, most seconds for each own line first"
    return [head, *(f"{seconds[name]:8.1f}{tests[name]:7}{own[name][0]:11}{own[name][1]:14}  {name}" for name in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "coverage", "table"], help="table: print the coverage that is kept")
    parser.add_argument("names", nargs="*", help="names of faults, or paths of tests; all without")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="processes of tests (default: 2)")
    arguments = parser.parse_args()
    if arguments.what == "faults":
        sys.exit(plant(arguments.names, arguments.at_once) or 0)
    if arguments.what == "coverage":
        measure(arguments.names, arguments.at_once)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
