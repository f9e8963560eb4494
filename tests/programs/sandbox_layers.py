"""Run as a script on a machine that lacks a layer: prints why the tool is refused, then what its code gives where that is accepted.

The last lines are those of two runs in a sandbox that stays.
"""

import asyncio
import ctypes
import os
import struct
import sys

from rlgraph.errors import GraphError
from rlgraph.nodes.sandbox import Limits, LocalSandbox, check, run
from rlgraph.nodes.walls import calls
from rlgraph.nodes.walls.kernel import LANDLOCK_CREATE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, check_result, libc

NEW_USER_AND_MOUNTS = 0x10020000
MOUNT = {"x86_64": 165, "aarch64": 40}
WRITTEN = "open('f', 'w').write('written'); open('f').read()"
THREAD = "import threading\nt = threading.Thread(target=print, args=('in a thread',)); t.start(); t.join()"


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


async def run_twice(layer: str) -> None:
    """Run code in a sandbox that stays: the second run needs a process of its own."""
    sandbox = LocalSandbox(Limits(), (layer,))
    try:
        for code in (WRITTEN, "open('f').read()"):
            done = await sandbox.exec(code)
            print(done.failed or done.output, end="" if done.output else "\n")
    finally:
        await sandbox.close()


def main(layer: str, mounts: str = "") -> None:
    prctl = calls.numbers(calls.LIMITED, calls.platform_column()[0])["prctl"]
    {
        # A machine may allow the namespaces and refuse the mounts in them, as AppArmor's rule does.
        "namespaces": (lambda: refusing(MOUNT[os.uname().machine])) if mounts else without_namespaces,
        "landlock": lambda: refusing(LANDLOCK_CREATE),
        "seccomp": lambda: refusing(prctl, PR_SET_SECCOMP),
    }[layer]()
    try:
        check(Limits())
    except GraphError as error:
        print(error)
    check(Limits(), (layer,))
    for code in (WRITTEN, "open('/etc/passwd').read()", THREAD):
        print(asyncio.run(run(code, Limits(), (layer,))), end="")
    asyncio.run(run_twice(layer))


if __name__ == "__main__":
    main(*sys.argv[1:])
