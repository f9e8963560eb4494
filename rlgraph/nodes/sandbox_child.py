"""The process that a model's code runs in: it walls itself in, then runs the code it reads from its input.

Run by its path, so that it loads nothing of this library. Arguments: seconds of processor time, bytes of memory, bytes of a file.
Landlock leaves it Python's own files to read and its working folder to write; a seccomp filter takes away sockets, new processes,
signals and what looks into other processes; neither needs privileges, and neither can be undone. Linux 5.13 or newer.
"""

import ast
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import traceback

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
DEVICES = ("/dev/null", "/dev/urandom", "/dev/zero")
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache")
CLONE_THREAD = 0x00010000
EPERM, ENOSYS = 1, 38

# What is refused, by its number on x86-64 and on 64-bit Arm (None: there is no such call).
REFUSED = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "ioprio_set": (251, 30),
    "prlimit64": (302, 261),
}
MACHINES = {"x86_64": (0, 0xC000003E, 56, 234), "aarch64": (1, 0xC00000B7, 220, 131)}  # column, audit arch, clone, tgkill
CLONE3 = 435


def main() -> None:
    """Read the code, wall the process in, run the code."""
    cpu_s, memory, file_bytes = (int(argument) for argument in sys.argv[1:4])
    code = sys.stdin.read()
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _leave_files(libc, os.getcwd())
    _leave_calls(libc)
    _run(code)


def _run(code: str) -> None:
    """Run the code as a notebook would: a last line that is an expression is printed. What it raises goes to its output."""
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, "tool")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "tool", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "tool", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 (whatever a model's code raises is for the model to read)
        print("".join(traceback.format_exception_only(type(error), error)).rstrip())
    sys.stdout.flush()


def _leave_files(libc: ctypes.CDLL, folder: str) -> None:
    """Leave Python's own files to read, and one folder to write."""
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        print("this kernel has no Landlock, which keeps a tool's code from other files", file=sys.stderr)
        sys.exit(3)
    everything = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    parts = [everything, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0]  # files; TCP; signals and abstract sockets
    attributes = struct.pack("=3Q", *parts)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _checked(libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    readable = {os.path.realpath(p) for p in (*LIBRARIES, *DEVICES, sys.prefix, sys.base_prefix, *sys.path) if p and os.path.exists(p)}
    for path, access in [*((path, READ) for path in sorted(readable)), (folder, everything)]:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & (1 << 0 | 1 << 1 | 1 << 2)
        rule = struct.pack("=Qi", allowed, handle)
        _checked(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(handle)
    _checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _leave_calls(libc: ctypes.CDLL) -> None:
    """Refuse the calls of `REFUSED`, processes but not threads, and signals to others."""
    column, arch, clone, tgkill = MACHINES[platform.machine()]
    load, equal, bits, give = 0x20, 0x15, 0x45, 0x06
    number, first_argument, allow, kill = 0, 16, 0x7FFF0000, 0x80000000

    def refuse(error: int) -> int:
        return 0x00050000 | error

    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, number)]
    program += [(0x35, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the calls of another word size
    for refused in (numbers[column] for numbers in REFUSED.values()):
        if refused is not None:
            program += [(equal, 0, 1, refused), (give, 0, 0, refuse(EPERM))]
    program += [(equal, 0, 1, CLONE3), (give, 0, 0, refuse(ENOSYS))]  # its flags cannot be seen; libraries fall back to clone
    program += [(equal, 0, 4, clone), (load, 0, 0, first_argument), (bits, 0, 1, CLONE_THREAD), (give, 0, 0, allow)]
    program += [(give, 0, 0, refuse(EPERM))]
    program += [(equal, 0, 4, tgkill), (load, 0, 0, first_argument), (equal, 0, 1, os.getpid()), (give, 0, 0, allow)]
    program += [(give, 0, 0, refuse(EPERM)), (give, 0, 0, allow)]
    packed = b"".join(struct.pack("=HBBI", *step) for step in program)
    steps = ctypes.create_string_buffer(packed)
    head = struct.pack("@HP", len(program), ctypes.addressof(steps))
    _checked(libc.prctl(SET_SECCOMP, FILTER_MODE, head, 0, 0), "seccomp")


def _checked(result: int, what: str) -> int:
    if result < 0:
        print(f"{what}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        sys.exit(3)
    return result


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the driver's to handle
    main()
