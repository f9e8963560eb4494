"""Hosts of namespaces with Ray on them: `ray_hosts.py CASE` prints what each command of a case did, one line of JSON each.

What a case is stands in `CASES`; the tests look at the lines.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import namespaces

GIVE_UP_S = 400
TESTS = Path(__file__).parents[1]
RLGRAPH = f"{sys.executable} -m rlgraph"
SMALL = "-- --num-cpus=1 --object-store-memory=80000000"
TINY = "from pathlib import Path; from rlgraph.engines.hf.pretrained import tiny_model; tiny_model(Path('model'))"
JOB, FIRST = f"{sys.executable} {TESTS / 'programs' / 'cluster_job.py'}", "10.99.0.1"
SLURM_CONF = """
ClusterName=hosts
SlurmctldHost=host1(10.99.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
SlurmctldPidFile=/dev/shm/slurmctld.pid
SlurmdPidFile=/dev/shm/slurmd.pid
SlurmctldLogFile=/dev/shm/slurmctld.log
SlurmdLogFile=/dev/shm/slurmd.log
SlurmdSpoolDir=/dev/shm/slurmd
StateSaveLocation=/dev/shm/ctld
NodeName=host1 NodeAddr=10.99.0.1 CPUs=1
NodeName=host2 NodeAddr=10.99.0.2 CPUs=1
NodeName=host3 NodeAddr=10.99.0.3 CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""
LEFT = "ps axo cmd= | grep -c '[r]ay::\\|[g]cs_server\\|[r]aylet'"


class Hosts(namespaces.Network):
    """A network whose hosts have homes, apart from one another."""

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts)
        for n in range(1, hosts + 1):
            self.home(n).mkdir()

    def home(self, n: int) -> Path:
        return self.shared / f"home{n}"

    def do(self, name: str, n: int, command: str, home: int = 0, **variables: str) -> None:
        """Run a shell command on a host, and print how it ended."""
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # No work is left on a host that ends: it need not drain for half a minute.
        quick = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        given = {"HOME": str(self.home(home or n)), "PYTHONPATH": paths, "PATH": bin_first, **quick, **variables}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
        wrapped = ["timeout", "--signal=INT", "--kill-after=10", str(GIVE_UP_S), "sh", "-c", command]
        ended = subprocess.run(self.command(n, *wrapped), env=kept | given, capture_output=True, text=True, check=False)
        print(json.dumps({"did": name, "code": ended.returncode, "out": ended.stdout, "err": ended.stderr[-4000:]}), flush=True)

    def token(self, n: int) -> Path:
        return self.home(n) / ".ray" / "auth_token"


def run_together(*commands: Callable[[], None]) -> None:
    """Run commands side by side, since each waits more than it computes."""
    with ThreadPoolExecutor(len(commands)) as pool:
        for done in [pool.submit(command) for command in commands]:
            done.result()


def tokens(hosts: Hosts) -> None:
    """One command on the head, one on each other host, a recipe as it stands over all; then wrong tokens, and the end."""
    run_together(
        lambda: hosts.do("start", 1, f"{RLGRAPH} cluster start --address {FIRST} {SMALL}"),
        lambda: hosts.do("model", 2, f'cd {hosts.shared}; {sys.executable} -c "{TINY}"'),
    )
    run_together(
        lambda: hosts.do("start again", 1, f"{RLGRAPH} cluster start --address {FIRST} {SMALL}"),
        lambda: hosts.do("join without a token", 2, f"{RLGRAPH} cluster join {FIRST} {SMALL}"),
        lambda: hosts.do("join with another token", 3, f"echo wrong | {RLGRAPH} cluster join {FIRST} --token - {SMALL}"),
    )
    run_together(
        lambda: hosts.do("join by a pipe", 2, f"cat {hosts.token(1)} | {RLGRAPH} cluster join {FIRST} --token - {SMALL}"),
        lambda: hosts.do("join with a shared home", 3, f"{RLGRAPH} cluster join {FIRST}:6379 {SMALL}", home=1),
    )
    recipe = f"{sys.executable} {TESTS.parent / 'recipes' / 'one_step_off.py'} model={hosts.shared}/model engine=transformers steps=2"
    run_together(
        lambda: hosts.do("recipe", 1, f"{recipe} out={hosts.shared}/out && test $(wc -l <{hosts.shared}/out/metrics.jsonl) = 2"),
        lambda: hosts.do("job with another token", 1, f"{JOB} 3", home=3),
        lambda: hosts.do("job without a token", 1, f"{JOB} 3", home=2, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH="/nowhere"),
    )
    run_together(*(lambda n=n: hosts.do(f"stop {n}", n, f"{RLGRAPH} cluster stop; {LEFT}") for n in (1, 2, 3)))
    hosts.do("job without Ray", 1, f"{JOB} 3")


def symmetric_run(hosts: Hosts) -> None:
    """`ray symmetric-run` on each host, as a launcher that runs one command everywhere would."""
    hosts.do("token", 1, f"ray get-auth-token --generate >/dev/null; ls -l {hosts.token(1)}")
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(hosts.token(1)), "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "150"}
    line = f"ray symmetric-run --address 10.99.0.1:6379 --min-nodes 3 {SMALL[3:]} --disable-usage-stats -- {JOB} 3"
    run_together(*(lambda n=n: hosts.do(f"run {n}", n, line, **variables) for n in (1, 2, 3)))


def slurm(hosts: Hosts) -> None:
    """SLURM's own daemons on each host, and `sbatch deploy/slurm.sh`."""
    conf = hosts.shared / "slurm.conf"
    conf.write_text(SLURM_CONF)
    at = {"SLURM_CONF": str(conf), "SLURM_EXPORT_ENV": "ALL", "RLGRAPH_RAY_OPTIONS": SMALL[3:], "RLGRAPH_TOKENS": str(hosts.shared)}
    hosts.do("controller", 1, "mkdir -p /dev/shm/ctld /dev/shm/slurmd; slurmctld", **at)
    for n in (1, 2, 3):
        hosts.do(f"daemon {n}", n, "mkdir -p /dev/shm/slurmd; slurmd", **at)
    hosts.do(
        "hosts", 1, "for i in $(seq 60); do sinfo -h -o '%t %D' | grep -q 'idle 3' && break; sleep 0.5; done; sinfo -h -o '%t %D'", **at
    )
    batch = f"sbatch --wait --parsable --nodes=3 --output={hosts.shared}/out {TESTS.parent / 'deploy' / 'slurm.sh'}"
    hosts.do("job", 1, f"{batch} {TESTS / 'programs' / 'cluster_job.py'} 3 7; code=$?; cat {hosts.shared}/out; exit $code", **at)
    hosts.do("programs", 1, f"grep -c '^hosts' {hosts.shared}/out", **at)
    hosts.do("tokens", 1, f"ls {hosts.shared} | grep -c slurm-", **at)


def jobs(hosts: Hosts) -> None:
    """`ray job submit` to the head's host, of a plan over two hosts and of a recipe on the head alone."""
    submit = "ray job submit --address http://127.0.0.1:8265"
    with_mode = {"RAY_AUTH_MODE": "token"}
    run_together(
        lambda: hosts.do("start", 1, f"{RLGRAPH} cluster start --address {FIRST} --jobs {SMALL}"),
        lambda: hosts.do("model", 2, f'cd {hosts.shared}; python -c "{TINY}"'),
    )
    hosts.do("join", 2, f"{RLGRAPH} cluster join {FIRST} {SMALL}", home=1)
    print(json.dumps({"did": "ports", "at": [address for address, ports in hosts.listening(1).items() if 8265 in ports]}), flush=True)
    run_together(
        lambda: hosts.do("without a mode", 1, f"{submit} -- python programs/cluster_job.py 2"),
        lambda: hosts.do(
            "without the token", 1, f"{submit} -- python programs/cluster_job.py 2", home=3, RAY_AUTH_TOKEN="wrong", **with_mode
        ),
    )
    recipe = f"python one_step_off.py model={hosts.shared}/model engine=transformers steps=2 out={hosts.shared}/out"
    hosts.do("job", 1, f"{submit} --working-dir {TESTS} -- python programs/cluster_job.py 2 7", **with_mode)
    hosts.do(
        "recipe", 1, f"{submit} --working-dir {TESTS.parent / 'recipes'} -- {recipe}; wc -l {hosts.shared}/out/metrics.jsonl", **with_mode
    )
    run_together(*(lambda n=n: hosts.do(f"stop {n}", n, f"{RLGRAPH} cluster stop; {LEFT}") for n in (1, 2)))


CASES: dict[str, Callable[[Hosts], None]] = {"tokens": tokens, "symmetric run": symmetric_run, "slurm": slurm, "jobs": jobs}


if __name__ == "__main__":
    made = Hosts(3)
    try:
        CASES[sys.argv[1]](made)
    finally:
        made.end()
