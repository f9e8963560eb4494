"""A command line as an agent program: a process of its own, whose printed text is read and which leaves nothing behind."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlgraph.nodes.environments.supervisor import DEADLINE

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
MOST_BYTES = 65536  # of what is printed; the end is kept
NO_PROXY = "127.0.0.1,localhost"
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")  # none of these holds a secret


class CommandFailed(Exception):
    """A command ended with a status other than 0."""


def environment_of(named: Sequence[str]) -> dict[str, str]:
    """Collect the variables of a command: a few of this process's, and those that are named, as "NAME" or "NAME=value".

    >>> environment_of(["MODE=fast"])["MODE"]
    'fast'

    Calls of this host bypass proxies. Raises CommandFailed where this process lacks a named one.
    """
    values = dict(given.split("=", 1) for given in named if "=" in given)
    passed = [given for given in named if "=" not in given]
    if missing := [name for name in passed if name not in os.environ]:
        raise CommandFailed(f"the environment of the worker has no variables {missing}")
    found = {name: os.environ[name] for name in (*PASSED, *passed) if name in os.environ} | values
    return found | {name: ",".join(filter(None, [found.get(name), NO_PROXY])) for name in ("no_proxy", "NO_PROXY")}


async def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a command in this environment, and return the end of what it prints. Cancelling it ends all that it has started.

    Raises TimeoutError at its deadline, and CommandFailed for a status other than 0.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", SUPERVISOR, str(seconds), *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        printed, complaints = await asyncio.gather(_end_of(child.stdout), _end_of(child.stderr))
        status = await child.wait()
    finally:
        child.stdin.close()  # from here on the supervisor ends what is left
    if status == DEADLINE:
        raise TimeoutError
    if status:
        raise CommandFailed(f"'{command[0]}' ended with status {status}: {complaints.strip()[-300:]}")
    return printed


async def _end_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while part := await stream.read(65536):
        kept = (kept + part)[-MOST_BYTES:]
    return kept.decode(errors="replace")
