"""Ray on three hosts with networks, processes and homes of their own, started by `rlgraph cluster`, with tokens."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import namespaces
from support.paths import PROGRAMS

pytestmark = [pytest.mark.stage("hosts"), pytest.mark.ray, pytest.mark.namespaces, pytest.mark.timeout(900)]  # a Ray host takes up to 20 s
ROOT = Path(__file__).parents[2]
PROGRAM = PROGRAMS / "ray_hosts.py"
Outcomes = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def outcomes() -> Callable[..., Outcomes]:
    """Run a case once, and give what each of its commands did."""
    ran: dict[str, Outcomes] = {}

    def run(case: str, python: str = sys.executable) -> Outcomes:
        if case not in ran:
            command = namespaces.isolate_command([python, str(PROGRAM), case])
            ended = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
            ran[case] = {line["did"]: line for line in map(json.loads, ended.stdout.splitlines())}
            assert ended.returncode == 0, ended.stderr
        return ran[case]

    return run


TOKENS = {
    "start": (0, "rlgraph cluster join 10.99.0.1:6379\n"),
    "start again": (1, "a Ray of `rlgraph cluster` runs on this host already"),
    "join without a token": (2, "home2/.ray/auth_token does not exist here; copy the head's"),
    "join by a pipe": (0, "Ray runs here as a host of 10.99.0.1:6379"),
    "join with another token": (2, "requires another token (RAY_AUTH_MODE is token) than"),
    "join with a shared home": (0, "Ray runs here as a host of 10.99.0.1:6379"),
    "recipe": (0, "Ray has 3 hosts with 3 cores; idle: none\n"),  # and two steps were recorded
    "job with another token": (1, "home3/.ray/auth_token, which is not the head's; copy the head's token there"),
    "job without a token": (1, "RAY_AUTH_MODE is token here, and the token's file is /nowhere, which does not exist"),
    "stop 1": (1, "ended"),  # grep, which counts what is left, found nothing
    "stop 2": (1, "\n0\n"),
    "stop 3": (1, "\n0\n"),
    "job without Ray": (1, "the plan takes 3 hosts and no Ray runs here; run `rlgraph cluster start` on this host"),
}


def check(did: Mapping[str, Any], code: int, said: str) -> None:
    assert did["code"] == code, did
    assert said in did["out"] + did["err"], did


@pytest.mark.parametrize("command", TOKENS)
def test_a_cluster_with_tokens_is_one_line_a_host_runs_a_recipe_over_all_and_names_a_wrong_token(
    outcomes: Callable[[str], Outcomes], command: str
) -> None:
    check(outcomes("tokens")[command], *TOKENS[command])


@pytest.mark.without_slurm
def test_one_line_on_every_host_runs_a_program_on_the_first(outcomes: Callable[[str], Outcomes]) -> None:
    did = outcomes("symmetric run")
    check(did["run 1"], 0, "hosts [0, 1, 2] same True")
    assert all("hosts [" not in did[f"run {n}"]["out"] for n in (2, 3)), "the program ran there too"


SLURM = {
    "hosts": (0, "idle 3"),
    "job": (7, "hosts [0, 1, 2] same True"),  # with the program's own status
    "programs": (0, "1\n"),  # on the first host alone
    "tokens": (1, "0\n"),  # none is left
}


@pytest.mark.slurm
@pytest.mark.parametrize("command", SLURM)
def test_a_batch_job_of_slurm_runs_over_its_hosts_with_a_token_of_its_own(outcomes: Callable[[str], Outcomes], command: str) -> None:
    check(outcomes("slurm")[command], *SLURM[command])


JOBS = {
    "start": (0, "RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- COMMAND\n"),
    "without a mode": (1, "Missing authentication token"),
    "without the token": (1, "Invalid authentication token"),
    "job": (1, "hosts [0, 1] same True"),
    "recipe": (0, "2 /tmp/"),  # lines of metrics
    "stop 1": (1, "\n0\n"),
    "stop 2": (1, "\n0\n"),
}


@pytest.mark.ray_jobs
@pytest.mark.parametrize("command", JOBS)
def test_ray_takes_jobs_with_the_token_over_hosts_and_on_the_head_alone(outcomes: Callable[..., Outcomes], command: str) -> None:
    did = outcomes("jobs", str(ROOT / ".venv-jobs" / "bin" / "python"))
    check(did[command], *JOBS[command])
    assert did["ports"]["at"] == ["127.0.0.1"], "jobs are taken from this host alone"
    assert "command failed with exit code 7" in did["job"]["out"], "the status is that of the program"
