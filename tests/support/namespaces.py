"""Hosts of namespaces: each has a network stack, processes, /tmp and /dev/shm of its own, and a port of one switch. All on this machine.

Host n is 10.99.0.n. Needs iproute2 and util-linux, and root or a kernel that gives users namespaces. The machine's own network stays as
it is: `isolate_command` starts a program in namespaces of its own, which makes the hosts there, and all of them end with it.
"""

import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
SWITCH = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
HOST = [*SWITCH, "--uts", "--ipc"]
LISTEN = "0A"  # in /proc/net/tcp
CLOCKS = os.path.exists("/proc/self/ns/time")
# The first process of a host: it mounts what is the host's own, and then buries whom others leave behind.
FIRST = """set -e; hostname "host$2"; mount --bind "$1/names" /etc/hosts; mount -t tmpfs -o size=400m none /dev/shm
mount -t tmpfs -o "size=$3" none "$1/own"; cd "$1/own"; mkdir new work tmp; chmod 1777 new
mount -t overlay none -o "lowerdir=/tmp,upperdir=$PWD/new,workdir=$PWD/work" tmp
mkdir -p "tmp${1#/tmp}/shared"; mount --bind "$1/shared" "tmp${1#/tmp}/shared"; mount --rbind tmp /tmp
cd /; echo up; exec >/dev/null; while :; do sleep 1000 & wait; done"""


def isolate_command(command: Sequence[str]) -> list[str]:
    """Wrap a command so that it runs in namespaces of its own, where it may look for a Ray, and ends with its parent."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *SWITCH, "env", "--unset=RAY_ADDRESS", *command]


def explain_refusal() -> str:
    """Say why this machine makes no such hosts; empty if it makes them."""
    try:
        done = subprocess.run(isolate_command([sys.executable, __file__]), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def address(host: int) -> str:
    return f"10.99.0.{host}"


def run(*command: str, patience_s: float = 0.0) -> None:
    """Run a command; with patience, again until it succeeds."""
    end = time.monotonic() + patience_s
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if not done.returncode:
            return
        if time.monotonic() > end:
            raise OSError(f"`{' '.join(command)}` failed: {done.stdout}{done.stderr}")
        time.sleep(0.05)


class Network:
    """A switch and the hosts that are up. `own_mib` bounds the /tmp of each. Hosts of two networks do not see each other.

    Unless they are `named`, no host's name leads to an address, its own neither.
    """

    def __init__(self, hosts: int, own_mib: int = 400, name: str = "s", *, named: bool = True) -> None:
        if os.getpid() != 1:
            raise OSError("not started by `isolate_command`: this would change the machine's own network")
        self._name = name
        self.folder = Path(tempfile.mkdtemp(prefix="hosts.", dir="/tmp"))  # each host lays a /tmp of its own over this one
        self.shared = self.folder / "shared"  # a folder that all hosts see
        self._own_mib = own_mib
        self._first: dict[int, subprocess.Popen[str]] = {}
        for part in ("shared", "own"):
            (self.folder / part).mkdir()
        names = ["127.0.0.1 localhost", *(f"{address(n)} host{n}" for n in range(1, hosts + 1) if named)]
        (self.folder / "names").write_text("\n".join(names) + "\n")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "link", "set", name, "up")
        for n in range(1, hosts + 1):
            self.start(n)

    def _port(self, n: int) -> str:
        return f"{self._name}p{n}"

    def start(self, n: int) -> None:
        """Start a host, empty."""
        clock = ["--time", "--monotonic", str(86_400 * n)] if CLOCKS else []  # as unlike as those of real hosts
        first = [*["unshare", *HOST, *clock], "bash", "-c", FIRST, "host", str(self.folder), str(n), f"{self._own_mib}m"]
        process = self._first[n] = subprocess.Popen(first, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise OSError(f"host {n} did not start")
        hardware = ["address", f"02:00:00:00:01:{n:02x}"]  # a host that comes back has the one that its peers know
        run("ip", "link", "add", self._port(n), "type", "veth", "peer", "name", "eth0", *hardware, "netns", str(process.pid))
        run("ip", "link", "set", self._port(n), "master", self._name, "up")
        self.on(n, "ip", "link", "set", "lo", "up")
        self.on(n, "ip", "address", "add", f"{address(n)}/24", "dev", "eth0")
        self.on(n, "ip", "link", "set", "eth0", "up")

    def command(self, n: int, *command: str) -> list[str]:
        """Wrap a command so that it runs on a host."""
        at = self._first[n].pid
        spaces = ["--net", "--mount", "--uts", "--ipc", f"--pid=/proc/{at}/ns/pid_for_children"]
        return ["nsenter", "--target", str(at), *spaces, f"--wdns={os.getcwd()}", "--", *command]

    def on(self, n: int, *command: str) -> None:
        """Run a command on a host and wait for it."""
        run(*self.command(n, *command))

    def fork(self, n: int, work: Callable[[], object]) -> int:
        """Run a function in a process of a host, forked from this one; return the id of the process that waits for it."""
        at = self._first[n].pid
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            here = os.getcwd()
            for space in ("net", "uts", "ipc", *(["time_for_children"] if CLOCKS else []), "pid_for_children", "mnt"):
                handle = os.open(f"/proc/{at}/ns/{space}", os.O_RDONLY)
                if LIBC.setns(handle, 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {space} of host {n}")
            os.chdir(here)
            inner = os.fork()
            if inner:
                code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
            else:
                work()
                code = 0
        except BaseException:  # noqa: BLE001 (nothing of this process goes on)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code & 0xFF)
        return 0

    def listening(self, n: int) -> dict[str, list[int]]:
        """List the TCP ports at which processes of a host listen, by address: what a scan of all ports from anywhere could find."""
        found: dict[str, list[int]] = {}
        for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
            lines = Path(f"/proc/{self._first[n].pid}/net/{file}").read_text().splitlines()[1:]
            for own, _, state in (line.split()[1:4] for line in lines):
                if state == LISTEN:
                    address, port = own.split(":")
                    words = b"".join(struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
                    found.setdefault(socket.inet_ntop(family, words), []).append(int(port, 16))
        return found

    def traffic(self, n: int) -> tuple[int, int]:
        """Count the bytes that a host has received over its link, and sent, with the headers of packets."""
        lines = Path(f"/proc/{self._first[n].pid}/net/dev").read_text().splitlines()
        fields = next(line for line in lines if line.strip().startswith("eth0:")).split(":")[1].split()
        return int(fields[0]), int(fields[8])

    def sniff(self, needle: bytes, ignored_port: int) -> None:
        """Begin to look for some bytes in what passes the switch by TCP, but for that of one port; `sniffed` tells what came of it."""
        self._sniffer = Sniffer(f"{self._name}p", needle, ignored_port)

    def sniffed(self) -> dict[str, int]:
        return self._sniffer.end()

    def kill(self, n: int) -> None:
        """End a host with all its processes, at once."""
        first = self._first.pop(n)
        first.kill()
        first.wait()
        end = time.monotonic() + 20
        while (
            subprocess.run(["ip", "link", "del", self._port(n)], capture_output=True, check=False).returncode == 0
            and time.monotonic() < end
        ):
            time.sleep(0.05)  # the kernel may take the port away by itself, together with the namespace

    def end(self) -> None:
        """End all hosts and remove what they shared."""
        for n in list(self._first):
            self.kill(n)
        shutil.rmtree(self.folder, ignore_errors=True)

    def freeze(self, n: int) -> None:
        """Stop all processes of a host; its network stack goes on answering."""
        self._signal(n, signal.SIGSTOP)

    def thaw(self, n: int) -> None:
        self._signal(n, signal.SIGCONT)

    def _signal(self, n: int, number: int) -> None:
        mine = os.readlink(f"/proc/{self._first[n].pid}/ns/net")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._first[n].pid and _net_of(entry) == mine:
                os.kill(int(entry.name), number)

    def cut(self, n: int) -> None:
        """Let the switch drop the packets of a host, in silence."""
        run("bridge", "link", "set", "dev", self._port(n), "state", "0")

    def join(self, n: int) -> None:
        """Undo `cut`, `unplug`, `mute` and `slow` of a host."""
        run("ip", "link", "set", self._port(n), "up")
        run("bridge", "link", "set", "dev", self._port(n), "state", "3", patience_s=10)  # the kernel takes a moment to see the cable
        self.on(n, "sh", "-c", "ip neigh flush nud permanent dev eth0; tc qdisc del dev eth0 root 2>/dev/null; true")
        subprocess.run(["tc", "qdisc", "del", "dev", self._port(n), "root"], capture_output=True, check=False)

    def unplug(self, n: int) -> None:
        """Take the cable of a host out."""
        run("ip", "link", "set", self._port(n), "down")

    def mute(self, n: int, towards: int) -> None:
        """Lose all that a host sends to another one; what the other sends still arrives."""
        self.on(n, "ip", "neigh", "replace", address(towards), "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")

    def slow(self, n: int, rate: str) -> None:
        """Bound the rate of a host's link in both directions, as "1mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms"]
        run("tc", "qdisc", "add", "dev", self._port(n), *shape)
        self.on(n, "tc", "qdisc", "add", "dev", "eth0", *shape)


class Sniffer:
    """Counts the bytes of packets at the ports of one switch, whose names begin alike, and the packets with some bytes in them."""

    def __init__(self, ports: str, needle: bytes, ignored_port: int) -> None:
        self._ports, self._needle, self._ignored = ports, needle, ignored_port
        self._bytes = self._found = 0
        self._tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
        self._tap.settimeout(0.2)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> dict[str, int]:
        self._over.set()
        self._thread.join()
        self._tap.close()
        return {"bytes": self._bytes, "found": self._found}

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                packet, (interface, *_) = self._tap.recvfrom(1 << 17)
            except TimeoutError:
                continue
            header = 14 + 4 * (packet[14] & 15)
            other = not interface.startswith(self._ports)  # that of a case at another switch
            if other or packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
                continue
            if self._ignored not in struct.unpack_from("!HH", packet, header):
                self._bytes += len(packet)
                self._found += self._needle in packet


def _net_of(process: Path) -> str:
    try:
        return os.readlink(process / "ns/net")
    except OSError:
        return ""


if __name__ == "__main__":  # does what the tests need, once
    network = Network(1)
    network.slow(1, "1mbit")
    network.mute(1, 2)
    network.cut(1)
    network.join(1)
    network.end()
