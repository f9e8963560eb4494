"""`--no-skips`: fail if a test skips. Continuous integration asks for it; a user's machine may lack a browser."""

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if a test skips")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    result = yield
    if skipped(session.config):  # after the second chance, which excuses no skip
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def skipped(config: pytest.Config) -> list[str]:
    """List the tests that skipped though none may, in the process that prints."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if not config.getoption("--no-skips") or terminal is None or hasattr(config, "workerinput"):
        return []
    return [report.nodeid for report in terminal.stats.get("skipped", [])]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if names := skipped(config):
        terminalreporter.write_line(f"ERROR: no test may skip here; these did: {', '.join(names)}", red=True)
