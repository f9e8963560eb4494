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


class CommandFailed(Exception):
    """A command ended with a status other than 0."""


async def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a command, and return the end of what it prints. Cancelling it ends the command with all that it has started.

    Raises TimeoutError at its deadline, and CommandFailed for a status other than 0.
    """
    proxies = {name: ",".join(filter(None, [os.environ.get(name), NO_PROXY])) for name in ("no_proxy", "NO_PROXY")}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", SUPERVISOR, str(seconds), *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **proxies, **environment},
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
