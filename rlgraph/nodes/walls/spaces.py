"""What a tool's code can reach: namespaces leave it a file system of Python and an empty folder, Landlock some paths to read.

In its namespaces there is no network, no other process and no shared memory. An ordinary user makes them in a user namespace. Root makes
them as root, then continues as nobody.
"""

import os
import struct

from .kernel import (
    LANDLOCK_ADD,
    LANDLOCK_CREATE,
    LANDLOCK_RESTRICT,
    MOUNT_SETATTR,
    MOVE_MOUNT,
    OPEN_TREE,
    PIVOT_ROOT,
    call,
    check_result,
    libc,
    mount,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FOLDER = "/tmp"  # the code's own folder
NOBODY = 65534
MOST_FILES = 4096  # each needs about a KiB of the kernel's memory
SPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x40000000  # mounts, cgroups, names, IPC, network
NEW_USER, NEW_PROCESSES = 0x10000000, 0x20000000
SLAVE, RECURSIVE, NO_SUID, NO_DEVICES, NO_PROGRAMS = 1 << 19, 1 << 14, 2, 4, 8
CLONE_TREE, AT_RECURSIVE, AT_EMPTY_PATH, EMPTY_SOURCE, HERE = 1, 0x8000, 0x1000, 4, -100
CLOSED_AT_EXEC, DETACH = 0o2000000, 2
READ_ONLY_NO_SUID, WITHOUT_DEVICES = 1 | 2, 4  # of mount_setattr


def enclose(readable: "Sequence[str]", folder_bytes: int) -> None:
    """Leave this process the readable paths and an empty `FOLDER` of `folder_bytes`, and put its next child in separate namespaces.

    Raises OSError naming the call that the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    as_root = user == 0 and _is_mapped(NOBODY) and libc.unshare(SPACES) == 0
    if not as_root:
        check_result(libc.unshare(NEW_USER | SPACES), "unshare of user, mount, network and IPC namespaces")
        for what, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            try:
                with open(f"/proc/self/{what}", "w") as file:
                    file.write(text)
            except OSError as error:  # as of root without CAP_SETFCAP
                raise OSError(error.errno, f"'{text}' in the {what} of a user namespace: {error.strerror}") from None
    mount(None, "/", None, SLAVE | RECURSIVE)  # so that changes to mounts in here do not reach the host
    check_result(libc.sethostname(b"sandbox", 7), "sethostname")
    _rebuild(readable, folder_bytes)
    # Last: if a kernel refuses an earlier step, this process can still start threads, and more than one child.
    check_result(libc.unshare(NEW_PROCESSES), "unshare of the process namespace")
    if as_root:
        check_result(libc.setgroups(0, None), "setgroups")
        check_result(libc.setresgid(NOBODY, NOBODY, NOBODY), "setresgid to nobody")
        check_result(libc.setresuid(NOBODY, NOBODY, NOBODY), "setresuid to nobody")
        libc.unshare(NEW_USER)  # if allowed: limits per user then do not include nobody's other processes


def _is_mapped(user: int) -> bool:
    """Whether a user exists in this user namespace: the root of a container may be its only one."""
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
    except OSError:
        return True
    return any(first <= user < first + count for first, _, count in ranges)


def _rebuild(readable: "Sequence[str]", folder_bytes: int) -> None:
    """Replace the root by a read-only one with a few paths."""
    os.umask(0o022)
    paths = sorted(filter(os.path.exists, {*readable, *DEVICES}), key=os.path.realpath)  # a folder before its contents
    trees = [(path, _tree(os.path.realpath(path), device=path in DEVICES)) for path in paths]
    mount("tmpfs", ".", "tmpfs", NO_SUID | NO_DEVICES, "size=1m,mode=755")
    os.chdir(os.getcwd())  # enters the new mount; until here the working directory is the folder below it
    os.makedirs(f".{FOLDER}", exist_ok=True)
    mount("tmpfs", f".{FOLDER}", "tmpfs", NO_SUID | NO_DEVICES | NO_PROGRAMS, f"size={folder_bytes},nr_inodes={MOST_FILES},mode=1777")
    # The folder comes first: Python itself may be below it, e.g. an environment in /tmp.
    for path, (tree, is_folder) in trees:
        _place(path, tree, is_folder)
    call(PIVOT_ROOT[os.uname().machine], "pivot_root", b".", b".")
    check_result(libc.umount2(b".", DETACH), "umount of the old root")
    call(MOUNT_SETATTR, "mount_setattr", HERE, b"/", 0, struct.pack("=4Q", READ_ONLY_NO_SUID, 0, 0, 0), 32)
    os.chdir(FOLDER)


def _tree(path: str, *, device: bool) -> tuple[int, bool]:
    """Open a read-only copy of the mount at a path, for `_place`: its handle, and whether it is a folder."""
    tree = call(OPEN_TREE, f"open_tree {path}", HERE, path.encode(), CLONE_TREE | AT_RECURSIVE | CLOSED_AT_EXEC)
    attributes = struct.pack("=4Q", READ_ONLY_NO_SUID | (0 if device else WITHOUT_DEVICES), 0, 0, 0)
    call(MOUNT_SETATTR, f"mount_setattr {path}", tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes, 32)
    return tree, os.path.isdir(path)


def _place(path: str, tree: int, is_folder: bool) -> None:
    """Mount a tree at its real path below this folder. If `path` goes through links, link it to there."""
    real = os.path.realpath(path)
    target = f".{real}"
    if not os.path.exists(target):  # else it is in a folder that was placed before
        os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
        if not is_folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        call(MOVE_MOUNT, f"move_mount {path}", tree, b"", HERE, target.encode(), EMPTY_SOURCE)
    os.close(tree)
    if real != path and not os.path.lexists(f".{path}"):
        os.makedirs(os.path.dirname(f".{path}"), exist_ok=True)
        os.symlink(real, f".{path}")


# Landlock lets the code read some paths and write its own folder.

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
