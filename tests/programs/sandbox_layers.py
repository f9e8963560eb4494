"""Run as a script on a machine that lacks a layer: prints why the tool is refused, then what its code gives where that is accepted."""

import asyncio
import ctypes
import os
import struct
import sys

from rlgraph.errors import GraphError
from rlgraph.nodes.sandbox import Limits, check, run
from rlgraph.nodes.walls import calls
from rlgraph.nodes.walls.kernel import LANDLOCK_CREATE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, check_result, libc

NEW_USER_AND_MOUNTS = 0x10020000
WRITTEN = "open('f', 'w').write('written'); open('f').read()"


def without_namespaces() -> None:
    """Enter a user namespace in which no other may be made, as an administrator may rule for all users."""
    user = os.getuid()
    check_result(libc.unshare(NEW_USER_AND_MOUNTS), "unshare")
    for path, text in (("/proc/self/setgroups", "deny"), ("/proc/self/uid_map", f"0 {user} 1")):
        with open(path, "w") as file:
            file.write(text)
    for name in ("user", "mnt", "pid"):
        with open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
            file.write("0")


def refusing(number: int, *first: int) -> None:
    """Answer a call, or one whose first argument is `first`, as a kernel does that lacks it."""
    matches = [step for value in first for step in ((calls.LOAD, 0, 0, 16), (calls.EQUAL, 0, 1, value))]
    skip = len(matches) + 1
    steps = [(calls.LOAD, 0, 0, 0), (calls.EQUAL, 0, skip, number), *matches]
    steps += [(calls.GIVE, 0, 0, calls.REFUSE | calls.ENOSYS), (calls.GIVE, 0, 0, calls.ALLOW)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    check_result(libc.prctl(PR_SET_SECCOMP, 2, struct.pack("@HP", len(steps), ctypes.addressof(packed)), 0, 0), "seccomp")


def main(layer: str) -> None:
    prctl = calls.numbers(calls.LIMITED, calls.platform_column()[0])["prctl"]
    {
        "namespaces": without_namespaces,
        "landlock": lambda: refusing(LANDLOCK_CREATE),
        "seccomp": lambda: refusing(prctl, PR_SET_SECCOMP),
    }[layer]()
    try:
        check(Limits())
    except GraphError as error:
        print(error)
    check(Limits(), (layer,))
    for code in (WRITTEN, "open('/etc/passwd').read()"):
        print(asyncio.run(run(code, Limits(), (layer,))), end="")


if __name__ == "__main__":
    main(sys.argv[1])
