"""Ray's token: in which mode Ray asks for one, and where it lies. Whoever knows it can run code on every host of the cluster."""

import os
from pathlib import Path

MODE, FILE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"  # Ray's own names
FIX = f"copy the head's token there, or name its file by {MODE}=token {FILE}=FILE; `rlgraph cluster start` prints where the head has it"


def token_file() -> Path:
    """The file in which Ray looks for its token."""
    named = os.environ.get(FILE)
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def described() -> str:
    """Say in which mode Ray is here and whence it takes the token."""
    mode = os.environ.get(MODE)
    said = f"{MODE} is {mode}" if mode else f"{MODE} is not set"
    if os.environ.get(TOKEN):
        return f"{said} here, and the token is that of the variable {TOKEN}, before any file"
    file = token_file()
    there = "is not the head's" if file.is_file() else "does not exist"
    return f"{said} here, and the token's file is {file}, which {there}"
