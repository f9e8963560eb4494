"""Stages of the tests: each test has one, and a stage that grew is named."""

import pytest
import stages

MIXED = 'import pytest\n@pytest.mark.stage("jobs")\ndef test_job(): ...\ndef test_quick(): ...\n'


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_it(): ...\n", {"quick"}),
        (MIXED, {"quick", "jobs"}),
        (f'pytestmark = [pytest.mark.stage("kills"), pytest.mark.ray]\n{MIXED}', {"kills", "jobs"}),
        ('CASE = pytest.param("calls", marks=[pytest.mark.ray, pytest.mark.stage("jobs")])\n', {"quick", "jobs"}),
    ],
)
def test_a_file_is_read_for_the_stages_of_its_tests(source: str, found: set[str]) -> None:
    assert stages.stages_in(source) == found


def test_a_stage_runs_its_own_tests(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['stages']")
    pytester.makepyfile(test_mixed=MIXED, test_other='import pytest\npytestmark = pytest.mark.stage("kills")\nimport no_such_module\n')
    for stage in ("quick", "jobs"):
        ran = pytester.runpytest("-v", "--stage", stage)
        ran.assert_outcomes(passed=1, deselected=1)
        ran.stdout.fnmatch_lines([f"*test_{'job' if stage == 'jobs' else 'quick'} PASSED*", f"{stage} *1*"])
    pytester.runpytest("--stage", "quick,jobs").assert_outcomes(passed=2)
    assert pytester.runpytest("--stage", "quick,job").ret == pytest.ExitCode.USAGE_ERROR


def test_a_stage_that_grew_by_more_than_a_fifth_is_named() -> None:
    costs = {"quick": {"tests": 9, "seconds": 130.0}, "jobs": {"tests": 1, "seconds": 110.0}}
    lines = stages.table(costs, {"quick": {"seconds": 100.0}, "jobs": {"seconds": 100.0}})
    assert [line for line in lines if "grew" in line] == ["quick grew: 130 s of tests, 100 s in stages.json"]
    assert "54%" in lines[1]
