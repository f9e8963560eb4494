"""System calls for which Python has no function."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38


def check_result(result: int, what: str) -> int:
    """Pass on the result of a call. Raises OSError naming the call if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(number: int, what: str, *arguments: int | bytes | None) -> int:
    """Make a system call by its number. Raises OSError if it fails."""
    return check_result(libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments))), what)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount as mount(2) does. Raises OSError if that fails."""
    parts = [None if part is None else part.encode() for part in (source, target, kind, options)]
    check_result(libc.mount(parts[0], parts[1], parts[2], ctypes.c_ulong(flags), parts[3]), f"mount {kind or ''} at {target}")
