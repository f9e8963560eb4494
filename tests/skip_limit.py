"""`--skips N`: exactly N tests skip, each for want of a GPU. Continuous integration asks for it; a user's machine may lack a browser."""

from typing import Any

import pytest

GPU_MARKERS = {"gpu", "multi_gpu"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skips", type=int, metavar="N", help="fail unless exactly N tests skip, each for want of a GPU")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """Fail a session whose tests skipped otherwise than `--skips` allows, and say which."""
    allowed, terminal = session.config.getoption("--skips"), session.config.pluginmanager.get_plugin("terminalreporter")
    if allowed is not None and terminal is not None and not hasattr(session.config, "workerinput"):
        skipped = terminal.stats.get("skipped", [])
        others = [report.nodeid for report in skipped if not GPU_MARKERS & set(getattr(report, "keywords", ()))]
        if others or len(skipped) != allowed:
            session.config.stash[WRONG] = f"{len(skipped)} tests skipped, {allowed} may, for want of a GPU; for another reason: {others}"
    result = yield
    if WRONG in session.config.stash:  # now: a second chance for what failed excuses no skip
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


WRONG = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if WRONG in config.stash:
        terminalreporter.write_line(f"ERROR: {config.stash[WRONG]}", red=True)
