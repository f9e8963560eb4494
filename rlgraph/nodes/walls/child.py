"""The process of a model's code: it enters its sandbox, then runs the code that it reads from its input.

Arguments: seconds of processor time, bytes of memory, bytes of its folder, the layers that may be missing, folders of packages, and all
readable paths. No layer needs privileges, and none can be undone.
"""

import _signal as signal  # `signal` loads `enum`, half of the start time
import os
import resource
import site
import struct
import sys

from . import calls, spaces
from .kernel import CAPSET, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, call, check_result, libc

TYPE_CHECKING = False  # loading `typing` and `collections` would take a fifth of the start
if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_NO_SANDBOX = 3  # exit status if a layer is missing
SIGNALLED = 64  # plus a signal: exit status of the first process of the namespace if that signal killed the code's process
MOST_THREADS = 128
GRACE_S = 5
ONLY_TREE = 0x400  # ast.PyCF_ONLY_AST, without the module ast, which loads slowly


def main() -> None:
    """Read the code, enter the sandbox, run the code."""
    seconds, memory, folder_bytes = (int(argument) for argument in sys.argv[1:4])
    accepted, packages, readable = sys.argv[4].split(","), sys.argv[5].split(os.pathsep), sys.argv[6:]
    sys.argv[:] = ["tool"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = sys.stdin.buffer.read().decode(errors="replace")
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # takes the place of the input
    die_with_parent()
    enclosed = layer("namespaces", accepted, lambda: spaces.enclose(readable, folder_bytes))
    if enclosed:
        os.environ["HOME"] = spaces.FOLDER
        die_with_parent()  # again: a change of user clears it
        _fork_into_namespaces(seconds)
    enter_inner_layers((seconds, memory, folder_bytes), enclosed, accepted, packages, readable)
    run(code)


def enter_inner_layers(limits: tuple[int, int, int], enclosed: bool, accepted: list[str], packages: list[str], readable: list[str]) -> None:
    """Enter the layers inside the namespaces, in the process that runs code, and give it its packages."""
    limit(*limits, count_threads=enclosed)
    layer("landlock", accepted, lambda: spaces.restrict_files(readable, os.getcwd()))
    layer("seccomp", accepted, calls.leave_calls)
    sys.path += packages
    site.setquit()  # gives the code `exit()`; Python's own search for packages would too, and needs ten milliseconds


def layer(name: str, accepted: list[str], enter: "Callable[[], None]") -> bool:
    """Enter one layer; False if it is missing and that is accepted. Else a missing layer ends the process."""
    try:
        enter()
    except OSError as error:
        if name in accepted:
            return False
        print(f"this machine lacks the layer '{name}' ({error})", flush=True)
        os._exit(EXIT_NO_SANDBOX)
    return True


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    check_result(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _fork_into_namespaces(seconds: int) -> None:
    """Fork twice and continue in the second process of the new namespaces.

    The first process and this one wait for it and exit with its status.
    """
    first = fork()
    if first:
        status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        if status < 0 or status >= SIGNALLED:
            number = -status if status < 0 else status - SIGNALLED
            try:  # noqa: SIM105 (contextlib loads slowly)
                signal.signal(number, signal.SIG_DFL)
            except OSError:  # SIGKILL, or one that libc keeps for itself
                pass
            os.kill(os.getpid(), number)
        os._exit(status)
    die_with_parent()
    signal.signal(signal.SIGALRM, lambda *_: os._exit(SIGNALLED + signal.SIGKILL))  # stops the code even if the parent is gone
    signal.alarm(seconds + GRACE_S)
    second = fork()
    if second:
        status = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
        os._exit(SIGNALLED - status if status < 0 else min(status, SIGNALLED - 1))
    die_with_parent()


def fork() -> int:
    """Fork. If the system cannot start another process, this one reports it and ends."""
    try:
        return os.fork()
    except OSError as error:
        print(f"no process can be started ({error})", flush=True)
        os._exit(EXIT_NO_SANDBOX)


def limit(seconds: int, memory: int, folder_bytes: int, *, count_threads: bool) -> None:
    """Set the limits of the process, and drop its rights in its namespaces."""
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, folder_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
        *([(resource.RLIMIT_NPROC, MOST_THREADS)] if count_threads else []),  # else it counts all processes of the user
    ):
        most = resource.getrlimit(limit)[1]
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (least, least))
    call(CAPSET[os.uname().machine], "capset", struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6))
    check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def run(code: str) -> None:
    """Run the code as a notebook would: print the value of a last expression. An exception goes to the output too."""
    import _ast

    names: dict[str, object] = {"__name__": "__main__"}
    try:
        tree: _ast.Module = compile(code, "tool", "exec", ONLY_TREE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, "tool", "exec"), names)
        if isinstance(last, _ast.Expr):
            value = eval(compile(_ast.Expression(last.value), "tool", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 (the model reads any error of its code)
        if isinstance(error, MemoryError):  # free the memory first: the next line needs some
            names.clear()
            error.__traceback__ = None
        import traceback

        print("".join(traceback.format_exception_only(type(error), error)).rstrip())
    sys.stdout.flush()
