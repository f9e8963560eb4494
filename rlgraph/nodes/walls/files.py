"""The files of a tool's code: Landlock lets it read some paths and write its own folder."""

import os
import struct

from .kernel import LANDLOCK_ADD, LANDLOCK_CREATE, LANDLOCK_RESTRICT, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

EXECUTE, WRITE, READ, READ_FOLDER = 1, 2, 4, 8
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def restrict_files(readable: "Iterable[str]", folder: str) -> None:
    """Leave the `readable` paths to read, a few harmless devices, and `folder` to write. Raises OSError if the kernel has no Landlock."""
    abi = call(LANDLOCK_CREATE, "landlock_create_ruleset", None, 0, 1)
    everything = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    parts = [everything, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0]  # files; TCP; signals and abstract sockets
    attributes = struct.pack("=3Q", *parts)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = call(LANDLOCK_CREATE, "landlock_create_ruleset", attributes, len(attributes), 0)
    access = dict.fromkeys(readable, EXECUTE | READ | READ_FOLDER) | dict.fromkeys(DEVICES, READ | WRITE) | {folder: everything}
    for path, allowed in access.items():
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed if os.path.isdir(path) else allowed & (EXECUTE | WRITE | READ), handle)
        call(LANDLOCK_ADD, f"landlock_add_rule {path}", rules, 1, rule, 0)
        os.close(handle)
    call(LANDLOCK_RESTRICT, "landlock_restrict_self", rules, 0)
    os.close(rules)
