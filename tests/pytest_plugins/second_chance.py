"""`--second-chance N`: at most N failed tests run once more, alone; they pass the run if all pass then, and are named as unstable.

As a script: runs the named tests in this process and writes what became of each into a file, for the process that asked.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-chance", type=int, default=0, metavar="N", help="run up to N failed tests once more, in one process, alone")


@pytest.hookimpl(wrapper=True, trylast=True)  # when all workers have ended, and before the terminal sums up
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """Run what failed once more; the session passes if all of it passes now."""
    result = yield
    most, terminal = session.config.getoption("--second-chance"), session.config.pluginmanager.get_plugin("terminalreporter")
    here = most and terminal is not None and not hasattr(session.config, "workerinput")
    if here and session.exitstatus == pytest.ExitCode.TESTS_FAILED and session.testsfailed:
        reports = [*terminal.stats.get("failed", []), *terminal.stats.get("error", [])]
        failed = list(dict.fromkeys(report.nodeid for report in reports))
        collected = all(isinstance(report, pytest.TestReport) for report in reports)
        if collected and 0 < len(failed) <= most:
            passed, printed = rerun_tests(failed, session.config.rootpath)
            session.config.stash[AGAIN] = ([test for test in failed if test in passed], [t for t in failed if t not in passed], printed)
            if passed == set(failed):
                session.exitstatus = pytest.ExitCode.OK
    return result


AGAIN = pytest.StashKey[tuple[list[str], list[str], str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    unstable, broken, printed = config.stash.get(AGAIN, ([], [], ""))
    if unstable:
        terminalreporter.section("unstable: passed when run alone", yellow=True, bold=True)
        terminalreporter.write_line("\n".join(unstable), yellow=True)
    if broken:
        terminalreporter.section("failed again when run alone", red=True, bold=True)
        terminalreporter.write_line(printed)
        terminalreporter.write_line("\n".join(broken), red=True)


def rerun_tests(tests: list[str], root: Path) -> tuple[set[str], str]:
    """Run the tests in one new process. Return those that passed, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        done = subprocess.run([sys.executable, __file__, str(file), *tests], cwd=root, capture_output=True, text=True)
        outcomes = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    called = {test for test, when, outcome in outcomes if (when, outcome) == ("call", "passed")}
    ended = {test for test, when, outcome in outcomes if (when, outcome) == ("teardown", "passed")}  # not so where its process died
    return called & ended, done.stdout + done.stderr


class Outcomes:
    """Writes the outcome of each phase of each test as soon as it is known: a test may end the process."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps([report.nodeid, report.when, report.outcome]) + "\n")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Outcomes(sys.argv[1])]))
