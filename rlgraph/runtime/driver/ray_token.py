"""Ray's token: in which mode Ray asks for one, and where it lies. Whoever knows it can run code on every host of the cluster."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

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
    with contextlib.suppress(OSError):  # a home that cannot be written: Ray says so
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as whole:  # for this user's eyes alone
            whole.write(secrets.token_hex(32))
            whole.flush()
            os.link(whole.name, file)  # fails if another one was first


def described() -> str:
    """Name Ray's mode here, and the file or variable from which it takes the token."""
    mode = os.environ.get(MODE)
    said = f"{MODE} is {mode}" if mode else f"{MODE} is not set"
    if os.environ.get(TOKEN):
        return f"{said} here, and the token is that of the variable {TOKEN}, before any file"
    file = token_file()
    there = "is not the head's" if file.is_file() else "does not exist"
    return f"{said} here, and the token's file is {file}, which {there}"
