"""The system calls of a tool's code: a seccomp filter that allows the calls of a list and refuses all others.

The calls in the list change nothing outside of the process except files, and Landlock and the namespaces leave it only its own folder.
The filter is built here, instruction by instruction, so that it needs only Python's standard library.
"""

import ctypes
import os
import struct

from .kernel import PR_SET_SECCOMP, check_result, libc

# Allowed with any arguments: name, number on x86-64, number on 64-bit Arm; - if that machine has no such call.
ALLOWED = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  preadv 295 69  pwritev 296 70  close 3 57
close_range 436 436  lseek 8 62  open 2 -  openat 257 56  stat 4 -  lstat 6 -  fstat 5 80  newfstatat 262 79  statx 332 291
access 21 -  faccessat 269 48  faccessat2 439 439  getdents64 217 61  readlink 89 -  readlinkat 267 78  getcwd 79 17  chdir 80 49
fchdir 81 50  mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38
symlink 88 -  symlinkat 266 36  link 86 -  linkat 265 37  truncate 76 45  ftruncate 77 46  fallocate 285 47  fsync 74 82
fdatasync 75 83  statfs 137 43  fstatfs 138 44  umask 95 166  sendfile 40 71  copy_file_range 326 285  dup 32 23  dup2 33 -
dup3 292 24  pipe 22 -  pipe2 293 59  mmap 9 222  munmap 11 215  mprotect 10 226  mremap 25 216  brk 12 214  msync 26 227  poll 7 -
ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -  epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -
epoll_pwait 281 22  eventfd 284 -  eventfd2 290 19  nanosleep 35 101  clock_nanosleep 230 115  pause 34 -  clock_gettime 228 113
clock_getres 229 114  gettimeofday 96 169  time 201 -  times 100 153  getrusage 98 165  setitimer 38 103  getitimer 36 102  alarm 37 -
futex 202 98  set_robust_list 273 99  rseq 334 293  set_tid_address 218 96  gettid 186 178  sched_yield 24 124
sched_getaffinity 204 123  getcpu 309 168  exit 60 93  exit_group 231 94  rt_sigaction 13 134  rt_sigprocmask 14 135
rt_sigreturn 15 139  rt_sigpending 127 136  rt_sigtimedwait 128 137  rt_sigsuspend 130 133  sigaltstack 131 132
restart_syscall 219 128  getpid 39 172  getppid 110 173  getpgrp 111 -  getpgid 121 155  getsid 124 156  getuid 102 174
geteuid 107 175  getgid 104 176  getegid 108 177  getresuid 118 148  getresgid 120 150  getgroups 115 158  getrlimit 97 163
uname 63 160  sysinfo 99 179  getrandom 318 278  recvfrom 45 207  shutdown 48 210
"""
# Allowed with the values of arguments that `conditions` returns.
LIMITED = """
clone 56 220  clone3 435 435  tgkill 234 131  fcntl 72 25  ioctl 16 29  madvise 28 233  prctl 157 167  prlimit64 302 261
socketpair 53 199  sendto 44 206  renameat2 316 276
"""
# Refused with the error of a file system without extended attributes, so that libraries continue without them.
UNSUPPORTED = """
listxattr 194 11  llistxattr 195 12  flistxattr 196 13  getxattr 191 8  lgetxattr 192 9  fgetxattr 193 10  setxattr 188 5
lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
"""

CLONE_OF_A_THREAD = (0x3D0F00, 0x7D0F00)  # the flags of glibc and of musl
TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, blocking, close at exec
HANDLES = (0, 1, 2, 3, 4, 1030, 1032)  # duplicate, flags of a descriptor; no locks, signals, leases or sizes of a pipe
ADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)  # how memory will be used; nothing that shares it between processes or marks it as broken
NAMES = (15, 16, 0x53564D41)  # of a thread, set or read, and of a piece of memory
AF_UNIX, EPERM, ENOSYS, EOPNOTSUPP = 1, 1, 38, 95
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, the architecture's number
LOAD, EQUAL, AT_LEAST, GIVE = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
ALL_BITS = 0x40000000  # set in the numbers of calls of another word size (x32)


def _low(argument: int) -> int:
    return 16 + 8 * argument


def _high(argument: int) -> int:
    return 20 + 8 * argument


def conditions(pid: int) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    """Build, for each limited call, the words of its arguments and their allowed values."""
    return {
        "clone": [(_low(0), CLONE_OF_A_THREAD)],
        "tgkill": [(_low(0), (pid,))],
        "fcntl": [(_low(1), HANDLES)],
        "ioctl": [(_low(1), TERMINAL)],
        "madvise": [(_low(2), ADVICE)],
        "prctl": [(_low(0), NAMES)],
        "prlimit64": [(_low(0), (0, pid)), (_low(2), (0,)), (_high(2), (0,))],  # reads limits, sets none
        "socketpair": [(_low(0), (AF_UNIX,))],
        "renameat2": [(_low(4), (0, 1, 2))],  # plain, not over another, in exchange; it leaves no device in the file's place
        "sendto": [(_low(4), (0,)), (_high(4), (0,))],  # only to the other end of the pair
    }


def leave_calls() -> None:
    """Refuse, for good, every call that the tables do not allow. Raises OSError if the kernel has no seccomp."""
    program = _program(platform_column(), os.getpid())
    packed = b"".join(struct.pack("=HBBI", *step) for step in program)
    steps = ctypes.create_string_buffer(packed)
    head = struct.pack("@HP", len(program), ctypes.addressof(steps))
    check_result(libc.prctl(PR_SET_SECCOMP, 2, head, 0, 0), "seccomp")


def platform_column() -> tuple[int, int]:
    """Look up this machine's column of the tables and its architecture's number. Raises OSError for a machine without a column."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(ENOSYS, f"no list of calls for {machine}, only for {' and '.join(MACHINES)}")
    return MACHINES[machine]


def numbers(table: str, column: int) -> dict[str, int]:
    """Map the names of a table's calls to their numbers on one machine."""
    words = table.split()
    rows = zip(words[0::3], words[1::3], words[2::3], strict=True)
    return {name: int(at[column]) for name, *at in rows if at[column] != "-"}


def _program(machine: tuple[int, int], pid: int) -> list[tuple[int, int, int, int]]:
    """Build the filter: instructions of (code, jump if true, jump if false, value)."""
    column, architecture = machine
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, 0, 1, ALL_BITS), (GIVE, 0, 0, KILL)]
    for number in numbers(ALLOWED, column).values():
        program += [(EQUAL, 0, 1, number), (GIVE, 0, 0, ALLOW)]
    for number in numbers(UNSUPPORTED, column).values():
        program += [(EQUAL, 0, 1, number), (GIVE, 0, 0, REFUSE | EOPNOTSUPP)]
    limited, where = numbers(LIMITED, column), conditions(pid)
    program += [(EQUAL, 0, 1, limited.pop("clone3")), (GIVE, 0, 0, REFUSE | ENOSYS)]  # filters cannot read its flags; libraries fall back
    for name, number in limited.items():
        checks: list[tuple[int, int, int, int]] = []
        for word, values in where[name]:
            checks.append((LOAD, 0, 0, word))
            checks += [(EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
            checks.append((GIVE, 0, 0, REFUSE | EPERM))
        program += [(EQUAL, 0, len(checks) + 1, number), *checks, (GIVE, 0, 0, ALLOW)]
    return [*program, (GIVE, 0, 0, REFUSE | EPERM)]
