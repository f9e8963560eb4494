"""Continuous integration fails when a test skips."""

import pytest

PASSES = "def test_it(): ...\n"
SKIPS = "import pytest\ndef test_it():\n    pytest.skip('no Chromium on this machine')\n"
MISSING = "import pytest\npytest.importorskip('no_such_package_here')\ndef test_it(): ...\n"


@pytest.mark.parametrize(
    ("source", "options", "passes"),
    [
        (PASSES, ["--no-skips"], True),
        (SKIPS, ["--no-skips"], False),
        (MISSING, ["--no-skips", "--numprocesses", "1"], False),
        (SKIPS, [], True),
    ],
)
def test_a_skip_fails_the_run_that_allows_none(pytester: pytest.Pytester, source: str, options: list[str], passes: bool) -> None:
    pytester.makeconftest("pytest_plugins = ['pytest_plugins.skip_limit']")
    pytester.makepyfile(test_other=PASSES, test_case=source)
    ran = pytester.runpytest("-p", "xdist", *options)
    assert (ran.ret == pytest.ExitCode.OK) is passes
    assert ("no test may skip here" in ran.stdout.str()) is not passes
