"""Ray's token: in which mode Ray asks for one, and where it lies. Whoever knows it can run code on every host of the cluster."""

import atexit
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from rlgraph import notices

MODE, FILE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"  # Ray's own names
FIX = f"copy the head's token there, or name its file by {MODE}=token {FILE}=FILE; `rlgraph cluster start` prints where the head has it"


def token_file() -> Path:
    """The file in which Ray looks for its token."""
    named = os.environ.get(FILE)
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def make_token() -> None:
    """Write the token for this user's own Rays if there is none. Of programs that start at once, all then have the same one.

    Ray would write the file in place when it starts: another program could read half of it, or overwrite what is in use.
    """
    file = token_file()
    if any(os.environ.get(name) for name in (MODE, FILE, TOKEN)) or file.exists():
        return
    try:
        _write(file)
    except FileExistsError:
        return
    except OSError as error:  # containers run as a user without a home
        folder = Path(tempfile.mkdtemp(prefix="rlgraph-token-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = folder / "auth_token"
        _write(file)
        os.environ[FILE] = str(file)
        notices.here.say(f"Ray's token cannot be written to its usual file ({error}): it lies in '{folder}' until this program ends")


def _write(file: Path) -> None:
    """Write a token that nobody else can read, whole or not at all. Raises FileExistsError if another program was first."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent) as whole:
        whole.write(secrets.token_hex(32))
        whole.flush()
        os.link(whole.name, file)


def described() -> str:
    """Name Ray's mode here, and the file or variable from which it takes the token."""
    mode = os.environ.get(MODE)
    said = f"{MODE} is {mode}" if mode else f"{MODE} is not set"
    if os.environ.get(TOKEN):
        return f"{said} here, and the token is that of the variable {TOKEN}, before any file"
    file = token_file()
    there = "is not the head's" if file.is_file() else "does not exist"
    return f"{said} here, and the token's file is {file}, which {there}"
