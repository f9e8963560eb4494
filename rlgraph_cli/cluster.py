"""`rlgraph cluster`: Ray on several hosts that know one token. Each command runs Ray's own `ray start` with what it needs."""

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

PORT = 6379
JOBS = "http://127.0.0.1:8265"  # Ray's own
MARK = "RLGRAPH_CLUSTER"  # in the environment of all that a command starts, by which `stop` knows it
TERM_S = 10.0  # for Ray's processes to end by themselves
KILL_S = 5.0
TOKEN_BYTES = 32

app = typer.Typer(help="Start Ray on several hosts, join them and stop it.", no_args_is_help=True)

Address = Annotated[str | None, typer.Option(help="The address at which the other hosts reach this one.")]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs that Ray may use here; all by default.")]
TokenFile = Annotated[Path | None, typer.Option(help="The token's file; by default Ray's own, ~/.ray/auth_token.")]
Options = Annotated[list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Further options of `ray start`.")]


@app.command()
def start(
    options: Options = None,
    address: Address = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Ray's port.")] = PORT,
    gpus: Gpus = None,
    jobs: Annotated[
        bool, typer.Option("--jobs", help="Accept `ray job submit` at 127.0.0.1:8265; needs the extra `default` of ray.")
    ] = False,
    token_file: TokenFile = None,
) -> None:
    """Start Ray on the first host, and print the line that joins another one."""
    if jobs:
        check_takes_jobs()
    file = _file(token_file)
    if not file.exists():
        write_token(file, secrets.token_hex(TOKEN_BYTES))
    own = address or own_address(("192.0.2.1", 9))  # of nobody: which way packets leave is all that is asked
    asked = ["--head", f"--port={port}", f"--node-ip-address={own}", f"--include-dashboard={str(jobs).lower()}"]
    _ray_start([*asked, *_resources(gpus), *(options or [])], file)
    named = "" if token_file is None else f" --token-file {file}"
    typer.echo(f"Ray runs at {own}:{port} and asks for the token of {file}\non each other host, where this file is there too:")
    typer.echo(f"    rlgraph cluster join {own}:{port}{named}\nand where it is not:")
    typer.echo(f"    ssh {own} cat {file} | rlgraph cluster join {own}:{port}{named} --token -")
    if jobs:
        where = f" RAY_AUTH_TOKEN_PATH={file}" if named else ""
        typer.echo(f"jobs are submitted here by\n    RAY_AUTH_MODE=token{where} ray job submit --address {JOBS} --working-dir . -- COMMAND")
    if named:
        typer.echo(f"programs find it by\n    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={file}")


@app.command()
def join(
    head: Annotated[str, typer.Argument(metavar="HEAD[:PORT]", help="The head's address, as `rlgraph cluster start` printed it.")],
    options: Options = None,
    address: Address = None,
    gpus: Gpus = None,
    token_file: TokenFile = None,
    token: Annotated[str | None, typer.Option(help="`-` reads the token from standard input, and keeps it in its file.")] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="For how many seconds the head may still have to start.")] = 60.0,
) -> None:
    """Start Ray on a further host, as a part of the head's cluster."""
    file, at = _file(token_file), parsed(head)
    if token is not None:
        _keep(file, token)
    if not file.exists():
        raise _refused(
            f"the token's file {file} does not exist here; copy the head's, or join with "
            f"`ssh {at[0]} cat THE_HEAD'S_FILE | rlgraph cluster join {head} --token -`"
        )
    _reach(at, wait_s)
    asked = [f"--address={at[0]}:{at[1]}", f"--node-ip-address={address or own_address(at)}"]
    _ray_start([*asked, *_resources(gpus), *(options or [])], file)
    typer.echo(f"Ray runs here as a host of {at[0]}:{at[1]}, with the token of {file}")


@app.command()
def stop() -> None:
    """End what `start` or `join` started on this host, workers included; any other Ray keeps running."""
    count = _end()
    _forget_address()
    typer.echo(f"ended {count} processes" if count else "nothing of a cluster runs here")


def _end() -> int:
    """End all that is marked, and count it."""
    living = _handles(_with_children(marked()))
    count = len(living)
    for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for handle in living:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        end = time.monotonic() + patience_s
        while living and (left := end - time.monotonic()) > 0:
            ended, _, _ = select.select(living, [], [], left)
            living = [handle for handle in living if handle not in ended]
    return count


def check_takes_jobs() -> None:
    """Raise ConfigError if Ray cannot accept jobs: it would start without a job server, silently."""
    from rlgraph.runtime.driver.ray_features import JOBS as NEEDED
    from rlgraph.runtime.driver.ray_features import find_missing

    if find_missing(NEEDED):
        raise _refused('start --jobs: this Ray accepts no jobs; run `pip install "ray[default]"` on this host')


def write_token(file: Path, token: str) -> None:
    """Write a token into a new file that only this user can read. Raises FileExistsError if there is one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as written:
        written.write(token)


def parsed(head: str) -> tuple[str, int]:
    """Split the head's address.

    >>> parsed("10.0.0.1"), parsed("head:7000")
    (('10.0.0.1', 6379), ('head', 7000))
    """
    host, _, port = head.partition(":")
    if not host or not (port or str(PORT)).isdigit():
        raise typer.BadParameter(f"{head!r} is not the address of a head; pass HOST or HOST:PORT, e.g. 10.0.0.1:{PORT}")
    return host, int(port or PORT)


def own_address(peer: tuple[str, int]) -> str:
    """Find this host's address on the way to a peer; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise _failed(f"this host cannot reach {peer[0]} ({error}); pass its own address with --address") from error
    return found


def marked() -> list[int]:
    """Find the processes of this user that a command started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid() and f"{MARK}=".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _with_children(pids: list[int]) -> list[int]:
    """Add the children of processes, and theirs: Ray's processes that rename themselves overwrite their environment."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    while pids:
        found += pids
        pids = [child for pid in pids for child in children.get(pid, ()) if child not in found]
    return list(dict.fromkeys(found))


def _handles(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def _forget_address() -> None:
    """Remove the file by which programs find this host's Ray, if nothing answers there: they would wait for it for minutes."""
    from rlgraph.runtime.driver.discovery import address_file

    file = address_file()
    with contextlib.suppress(OSError):
        at = parsed(file.read_text(encoding="utf-8").strip())
        try:
            socket.create_connection(at, timeout=1).close()
        except OSError:
            file.unlink()


def _file(named: Path | None) -> Path:
    from rlgraph.runtime.driver.ray_cluster import token_file

    return (named or token_file()).absolute()


def _keep(file: Path, token: str) -> None:
    """Keep the token of standard input in its file. A file with another one is left as it is."""
    if token != "-":
        raise typer.BadParameter("--token accepts only `-`: on a command line every user of this host could read the token")
    read = sys.stdin.readline().strip()
    if not read:
        raise _refused("--token -: standard input is empty; did the command before the `|` fail?")
    if not file.exists():
        write_token(file, read)
    elif file.read_text(encoding="utf-8").strip() != read:
        raise _refused(f"{file} holds another token already, perhaps of another cluster; pass another file with --token-file, or remove it")


def _reach(head: tuple[str, int], wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection(head, timeout=3).close()
        except OSError as error:
            if time.monotonic() > end:
                raise _failed(f"nothing answers at {head[0]}:{head[1]} ({error}); run `rlgraph cluster start` there first") from error
            time.sleep(0.5)
        else:
            return


def _resources(gpus: int | None) -> list[str]:
    return [] if gpus is None else [f"--num-gpus={gpus}"]


def _ray_start(arguments: list[str], file: Path) -> None:
    """Run `ray start`, which returns when Ray is up."""
    from rlgraph.runtime.driver.ray_cluster import FILE, MODE, TOKEN

    if marked():
        raise _failed("a Ray of `rlgraph cluster` runs on this host already; stop it with `rlgraph cluster stop`")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--disable-usage-stats"]
    environment = {**os.environ, MODE: "token", FILE: str(file), MARK: "1"}
    environment.pop(TOKEN, None)  # it would be taken before the file
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return
    _end()  # of a head that failed late, some processes live
    said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
    if any("AuthenticationError" in line for line in said):
        raise _refused(
            f"Ray there requires another token ({MODE} is token) than {file} holds; copy the head's file here, or pass its --token-file"
        )
    raise _failed("`ray start` failed: " + "\n".join(said[-5:]))


def _refused(why: str) -> Exception:
    """Make the error for a setting that cannot work."""
    from rlgraph.errors import ConfigError

    return ConfigError(f"rlgraph cluster: {why}")


def _failed(why: str) -> Exception:
    from rlgraph.errors import PlanError

    return PlanError(f"rlgraph cluster: {why}")
