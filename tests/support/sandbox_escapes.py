"""Attempts to get out of the sandbox, as code of the tool `python`. Each prints ESCAPED where it could do what it tries.

`OUTSIDE` ones also work without a sandbox, where a test runs them once to show that they would be noticed.
"""

PRELUDE = """
import ctypes, errno, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == 'aarch64'
def call(number, *arguments):
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)))
    return good(result)
def good(result):
    if result in (-1, 2 ** 64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def escaped(*what):
    print('ESCAPED', *what)
def every(*attempts):
    errors = []
    for attempt in attempts:
        try:
            attempt()
            escaped()
        except OSError as error:
            errors.append(error)
    raise errors[0]
"""

OUTSIDE = {
    "read a secret": "escaped(open(secret).read())",
    "read a secret by a link": "os.chdir(mine); os.symlink(secret, 'l'); escaped(open('l').read())",
    "read a secret by a folder's handle": "handle = os.open(folder, os.O_RDONLY); escaped(os.stat('secret', dir_fd=handle))",
    "stat a secret": "escaped(os.stat(secret))",
    "see whether a secret is there": "escaped() if os.access(secret, os.F_OK) else os.stat(secret)",
    "list a folder": "escaped(os.listdir(folder))",
    "watch a folder": "watch = good(libc.inotify_init()); good(libc.inotify_add_watch(watch, folder.encode(), 0xfff)); escaped()",
    "read who lives here": "escaped(open('/etc/passwd').read())",
    "read what processes there are": "escaped(os.listdir('/proc'))",
    "read the machine's devices": "escaped(os.listdir('/sys/class'))",
    "read the environment of the parent": "escaped(open(f'/proc/{os.getppid()}/environ', 'rb').read())",
    "read a secret by another's root": "escaped(open(f'/proc/{victim}/root{secret}').read())",
    "read the names of shared memory": "escaped(os.listdir('/dev/shm'))",
    "write a file": "open(public, 'w').write('changed')",
    "add to a file": "open(public, 'a').write('changed')",
    "cut a file": "os.truncate(public, 0)",
    "make a file": "open(folder + '/new', 'w')",
    "make a folder": "os.mkdir(folder + '/new')",
    "make a pipe": "os.mkfifo(folder + '/new')",
    "make a link": "os.symlink('/', folder + '/new')",
    "make a hard link": "os.link(public, folder + '/new')",
    "rename a file": "os.rename(public, folder + '/new')",
    "remove a file": "os.unlink(public)",
    "set the mode of a file": "os.chmod(own, 0o777)",
    "set the mode of an open file": "os.fchmod(os.open(own, os.O_RDONLY), 0o777)",
    "set the times of a file": "os.utime(own, (1, 1))",
    "set an attribute of a file": "os.setxattr(own, 'user.a', b'b')",
    "lock a file": "import fcntl; fcntl.flock(open(own), fcntl.LOCK_EX); escaped()",
    "fork": "pid = os.fork()\nif not pid: os._exit(0)\nescaped()",
    "vfork and execute": "os.posix_spawn(sys.executable or '/usr/bin/python3', ['python3', '-c', ''], {}); escaped()",
    "run a program": "import subprocess; subprocess.run([sys.executable or '/usr/bin/python3', '-c', '']); escaped()",
    "become a program": "os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "leave its session": "os.setsid(); escaped()",
    "kill a process": "os.kill(victim, signal.SIGKILL)",
    "signal a process": "os.kill(victim, signal.SIGTERM)",
    "signal a thread of a process": "call(131 if ARM else 234, victim, victim, 9)",
    "queue a signal": "call(138 if ARM else 129, victim, 9, struct.pack('=3i', 9, 0, -1) + bytes(116))",
    "signal a process by its handle": "call(424, call(434, victim, 0), 9, 0, 0)",
    "find a process": "os.kill(victim, 0); escaped()",
    "find its parent": "os.kill(os.getppid(), 0); escaped()",
    "have a signal sent to a process": (
        "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, victim); fcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); time.sleep(0.1); escaped()"
    ),
    "slow a process down": "os.setpriority(os.PRIO_PROCESS, victim, 19)",
    "put a process on one core": "os.sched_setaffinity(victim, {0})",
    "make a process idle": "os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0))",
    "make a process idle by attributes": "call(274 if ARM else 314, victim, struct.pack('=IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
    "take a process off the disk": "call(30 if ARM else 251, 1, victim, 3 << 13); escaped()",
    "limit a process": "resource.prlimit(victim, resource.RLIMIT_NOFILE, (7, 7))",
    "trace a process": "call(117 if ARM else 101, 16, victim, 0, 0); escaped()",
    "connect to a port": "socket.create_connection(('127.0.0.1', port), 2)",
    "send to a port": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "listen at a port": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped()",
    "connect to a socket at a path": "socket.socket(socket.AF_UNIX).connect(listening)",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + abstract)",
    "ask about the network": "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); escaped()",
    "attach shared memory": "call(196 if ARM else 30, segment, 0, 0); escaped()",
    "look at shared memory": "call(195 if ARM else 31, segment, 2, ctypes.create_string_buffer(256)); escaped()",
    "remove shared memory": "call(195 if ARM else 31, segment, 0, 0)",
    "make shared memory": "key = call(194 if ARM else 29, 0, 4096, 0o666); libc.shmctl(key, 0, 0); escaped()",
    "make a semaphore": "key = call(190 if ARM else 64, 0, 1, 0o666); libc.semctl(key, 0, 0); escaped()",
    "make a queue of messages": "key = call(186 if ARM else 68, 0, 0o666); libc.msgctl(key, 0, 0); escaped()",
    "write shared memory by its name": "f = os.open('/dev/shm/' + shared, os.O_RDWR); os.write(f, b'changed')",
    "make memory that no limit counts": "f = os.memfd_create('m'); escaped()",
    "read its descriptors": "escaped(os.listdir('/proc/self/fd'))",
    "a larger pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); escaped()",
    "make a namespace of its own": "call(97 if ARM else 272, 0x10000000); escaped()",
    "change the personality": "call(92 if ARM else 135, 0x0040000); escaped()",
    "send a descriptor": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0]); escaped()",
}

WITHIN = {
    "read a secret by the first process's root": "escaped(open('/proc/1/root' + secret).read())",
    "go up from its folder": "os.chdir('..'); os.chdir('../../..'); escaped(open('.' + secret).read())",
    "change its root": "os.chroot('.'); escaped()",
    "mount the processes": "os.mkdir('p'); good(libc.mount(b'proc', b'p', b'proc', 0, None)); escaped(os.listdir('p'))",
    "mount by the newer calls": "escaped(call(430, b'tmpfs', 0))",
    "clone a mount": "escaped(call(428, -100, b'/', 1))",
    "make its libraries writable": "good(libc.mount(None, b'/usr/lib', None, 32 | 4096, None)); escaped()",
    "take its libraries away": "good(libc.umount2(b'/usr/lib', 2)); escaped()",
    "turn its root back": "call(41 if ARM else 155, b'.', b'.'); escaped()",
    "enter another's namespace": "call(268 if ARM else 308, 0, 0); escaped()",
    "make a namespace to mount in": "call(97 if ARM else 272, 0x10020000); escaped()",
    "clone with a namespace": "pid = call(220 if ARM else 56, 0x10000000 | 17, 0, 0, 0, 0); pid or os._exit(0); escaped()",
    "clone a process by the newer call": "call(435, struct.pack('=11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88) or os._exit(0); escaped()",
    "open a file by its number": "call(265 if ARM else 304, -100, struct.pack('=Ii8s', 8, 1, bytes(8)), 0); escaped()",
    "make a device": "os.mknod('d', 0o600 | 0o060000, os.makedev(254, 0)); escaped(open('d', 'rb').read(1))",
    "leave a device in a file's place": "open('f', 'w'); call(276 if ARM else 316, -100, b'f', -100, b'g', 4); escaped()",
    "read the machine's memory": "escaped(open('/dev/mem', 'rb').read(1))",
    "write what Python loads": "open(os.__file__, 'a'); escaped()",
    "put a folder beside what Python loads": "n = os.path.dirname(os.__file__) + '/escaped'; os.mkdir(n); os.rmdir(n); escaped()",
    "write into the root": "open('/new', 'w')",
    "rename what Python loads": "os.rename(os.__file__, os.__file__); escaped()",
    "set the mode of what Python loads": "os.chmod(os.__file__, os.stat(os.__file__).st_mode); escaped()",
    "set the owner of a file": "open('f', 'w'); os.chown('f', 0, 0); escaped()",
    "become root": "os.setuid(0); escaped()",
    "become another group": "os.setgroups([0]); escaped()",
    "take rights back": (
        "all = struct.pack('=6I', *[2 ** 32 - 1, 2 ** 32 - 1, 0] * 2)\n"
        "call(91 if ARM else 126, struct.pack('=Ii', 0x20080522, 0), all); escaped()"
    ),
    "outlive its parent": "good(libc.prctl(1, 0, 0, 0, 0)); escaped()",
    "be seen by a debugger": "good(libc.prctl(4, 1, 0, 0, 0)); escaped()",
    "filter its own calls": "good(libc.prctl(22, 2, struct.pack('@HP', 1, 0), 0, 0)); escaped()",
    "rule over files anew": "escaped(call(444, None, 0, 1))",
    "raise its limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); escaped()",
    "raise its limits a little": "n = resource.getrlimit(0)[0]; resource.setrlimit(0, (n + 1, n + 1)); escaped()",
    "signal all": "os.kill(-1, 0); escaped()",
    "signal its group": "os.killpg(0, 0); escaped()",
    "trace itself": "good(libc.ptrace(0, 0, 0, 0)); escaped()",
    "read another's memory": (
        "b = ctypes.create_string_buffer(8); v = struct.pack('@PN', ctypes.addressof(b), 8)\n"
        "every(*(lambda p=p: call(270 if ARM else 310, p, v, 1, v, 1, 0) for p in (1, os.getppid(), victim)))"
    ),
    "write another's memory": (
        "b = ctypes.create_string_buffer(8); v = struct.pack('@PN', ctypes.addressof(b), 8)\n"
        "every(*(lambda p=p: call(271 if ARM else 311, p, v, 1, v, 1, 0) for p in (1, os.getppid(), victim)))"
    ),
    "take another's descriptor": "every(*(lambda p=p: call(438, call(434, p, 0), 1, 0) for p in (1, victim)))",
    "compare with another": "call(272 if ARM else 312, os.getpid(), 1, 0, 0, 0); escaped()",
    "advise another's memory": "call(440, 0, None, 0, 0, 0); escaped()",
    "send raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); escaped()",
    "talk to the machine below": "socket.socket(40, socket.SOCK_STREAM); escaped()",
    "encrypt in the kernel": "socket.socket(38, socket.SOCK_SEQPACKET); escaped()",
    "find an address": "escaped(socket.getaddrinfo('localhost', 80, proto=6))",
    "a pair of another family": "socket.socketpair(40); escaped()",
    "make shared memory of a name": "from multiprocessing import shared_memory as s; s.SharedMemory('m', create=True, size=8); escaped()",
    "a queue by its name": "call(180 if ARM else 240, b'q', os.O_CREAT | os.O_RDWR, 0o600, None); escaped()",
    "secret memory": "escaped(call(447, 0))",
    "locked memory": "escaped(call(228 if ARM else 149, 4096 * 1000, 4096))",
    "faults of memory": "escaped(call(282 if ARM else 323, 0))",
    "rings of requests": "escaped(call(425, 8, ctypes.create_string_buffer(120)))",
    "requests to the disk": "escaped(call(0 if ARM else 206, 8, ctypes.create_string_buffer(8)))",
    "a program in the kernel": "escaped(call(280 if ARM else 321, 0, ctypes.create_string_buffer(128), 128))",
    "counters of the processor": "escaped(call(241 if ARM else 298, struct.pack('=II', 1, 112) + bytes(104), 0, -1, -1, 0))",
    "add a key": "escaped(call(217 if ARM else 248, b'user', b'k', b'v', 1, -4))",
    "find a key": "escaped(call(218 if ARM else 249, b'user', b'k', None, -4))",
    "a ring of keys": "escaped(call(219 if ARM else 250, 0, -4, 1))",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()",
    "turn the clock": "call(171 if ARM else 159, ctypes.create_string_buffer(struct.pack('=I', 1) + bytes(252))); escaped()",
    "name the machine": "socket.sethostname(socket.gethostname()); escaped()",
    "read the kernel's log": "escaped(call(116 if ARM else 103, 3, ctypes.create_string_buffer(64), 64))",
    "load into the kernel": "call(273 if ARM else 313, 0, b'', 0); escaped()",
    "reach the ports of the machine": "escaped(call(-1 if ARM else 172, 3))",
    "swap": "call(224 if ARM else 167, b'f', 0); escaped()",
    "limits of a disk": "call(60 if ARM else 179, 0x800007 << 8, None, 0, ctypes.create_string_buffer(128)); escaped()",
    "write all to disk": "call(81 if ARM else 162); escaped()",
    "watch the whole system": "escaped(call(262 if ARM else 300, 0, 0))",
    "type at the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); escaped()",
    "hang the terminal up": "call(58 if ARM else 153); escaped()",
    "move memory to another node": "call(238 if ARM else 256, os.getpid(), 1, None, None); escaped()",
    "an old table of memory": "escaped(call(-1 if ARM else 154, 0, ctypes.create_string_buffer(64), 64))",
    "copy between pipes in the kernel": "r, w = os.pipe(); escaped(call(76 if ARM else 275, r, None, w, None, 1, 0))",
    "put pages into a pipe": "r, w = os.pipe(); escaped(call(75 if ARM else 278, w, None, 0, 0))",
    "a handle of a process": "escaped(call(434, os.getpid(), 0))",
    "a timer that signals": "escaped(call(107 if ARM else 222, 0, None, ctypes.create_string_buffer(8)))",
    "the environment": "escaped() if 'SECRET' in os.environ else os.stat('/nothing')",
    "what waits at its input": "escaped() if os.read(0, 1) else os.stat('/nothing')",
    "a limit taken from the second argument": "call(261 if ARM else 302, 0, 7, struct.pack('=QQ', 9999, 9999), None); escaped()",
}
