"""A connection to one peer that knows the job's key: framed bytes, handles of files, a deadline for each call. Never pickle.

Before anything else is read, both sides prove that they know the key, with an HMAC over the other's random challenge and their own
role; on an encrypted connection also over the certificate that they see. A peer sends bytes of a known length, whose content
`protocol` and `runtime.messages` check.
"""

import contextlib
import ctypes
import errno
import fcntl
import hmac
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing import AuthenticationError

import msgspec

from rlgraph.channels.host.encryption import EncryptedSocket, encrypt_socket
from rlgraph.errors import ChannelBroken, ChannelError, ChannelTimeout

# End connections to other hosts if bytes are in flight and none is acknowledged. Keep-alive covers only connections without such bytes.
#
# `TCP_USER_TIMEOUT` detects this too. But it also ends the connection of a living peer that does not read, because it holds its
# interpreter or is busy: its window is closed, though its kernel answers.

LOST_S = 5  # a host that does not answer for this long is lost, whether bytes are in flight or not
LOOK_S = 0.5
_UNACKNOWLEDGED_AND_SILENT_MS = struct.Struct("=24xI28xI")  # of `struct tcp_info`: tcpi_unacked, tcpi_last_ack_recv


class LinkWatch:
    """Checks the connections of a process on one thread, which ends with the last connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._suspected: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._runs = False

    def add(self, link: socket.socket) -> None:
        """Watch a TCP connection until it is closed."""
        with self._lock:
            self._links.add(link)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="link watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                for link in list(self._links):
                    self._look(link)
                if not self._links:
                    self._runs = False
                    return

    def _look(self, link: socket.socket) -> None:
        """End a link that two checks in a row find lost: after a pause of this whole machine, answers arrive between two checks."""
        try:
            lost = is_unanswered(link)
        except OSError:  # it is closed
            self._links.discard(link)
            return
        if not lost:
            self._suspected.discard(link)
        elif link not in self._suspected:
            self._suspected.add(link)
        else:
            self._links.discard(link)
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link, socket.SHUT_RDWR)  # also for TLS, whose own method would read on as plain text


def is_unanswered(link: socket.socket) -> bool:
    """Whether bytes are in flight and the other host has acknowledged none for `LOST_S`. Raises OSError if the link is closed."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED_AND_SILENT_MS.size)
    under_way, silent_ms = _UNACKNOWLEDGED_AND_SILENT_MS.unpack(info)
    return under_way > 0 and silent_ms >= LOST_S * 1000


_watch = LinkWatch()


def watch(link: socket.socket) -> None:
    """Watch a TCP connection of this process until it is closed."""
    _watch.add(link)


def _forget_links() -> None:
    global _watch
    _watch = LinkWatch()


os.register_at_fork(after_in_child=_forget_links)


# Addresses of connections: on one host a path in a folder of the job, between hosts `address:port`.

MAX_PATH_BYTES = 107 - len(".new")  # sun_path of sockaddr_un, and what `listen` appends
_IN_MOVED_TO = 0x80


def is_path(address: str) -> bool:
    return address.startswith("/")


def check_address(channel: str, address: str, carrier: str | None = None) -> None:
    """Raise ChannelError for a path too long for a Unix-domain socket, or for a path together with a carrier."""
    if is_path(address) and carrier is not None:
        raise ChannelError(
            f"channel '{channel}' listens at the path '{address}' and has the carrier '{carrier}'; on one host readers map the "
            "writer's memory, so give an address host:port, or no carrier"
        )
    size = len(os.fsencode(address))
    if is_path(address) and size > MAX_PATH_BYTES:
        raise ChannelError(
            f"channel '{channel}': the socket path '{address}' has {size} bytes and may have {MAX_PATH_BYTES}; "
            "put the folder of the job at a shorter path"
        )


def listen(channel: str, address: str, backlog: int) -> socket.socket:
    """Listen at a path or at `address:port`. The path appears only once it accepts connections.

    Port 0 chooses a free port. Raises ChannelError if another writer has the path or the port.
    """
    if is_path(address):
        return _listen_at_path(channel, address, backlog)
    host, port = _host_and_port(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        advice = {
            errno.EADDRINUSE: "another program has that port; leave it 0 to take any that is free",
            errno.EADDRNOTAVAIL: "no network interface of this host has that address; pass one of this host",
            errno.EACCES: "this user may not take that port; choose one above 1023",
        }.get(error.errno or 0, "choose another address")
        raise ChannelError(f"channel '{channel}' cannot listen at '{address}': {error.strerror}; {advice}") from error
    return listener


def _listen_at_path(channel: str, address: str, backlog: int) -> socket.socket:
    if os.path.exists(address):
        raise ChannelError(f"channel '{channel}': '{address}' is in use; every channel of a job needs its own path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address + ".new")
        listener.listen(backlog)
        os.rename(address + ".new", address)
    except OSError as error:
        listener.close()
        raise ChannelError(f"channel '{channel}' cannot listen at '{address}': {error.strerror}") from error
    return listener


def bound(listener: socket.socket) -> str:
    """The address at which a socket listens."""
    name = listener.getsockname()
    return name if isinstance(name, str) else _join_address(*name[:2])


def close_listener(listener: socket.socket, address: str) -> None:
    """Stop listening; a thread in `accept` wakes with an OSError."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    if is_path(address):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)


def dial(where: str, address: str, timeout_s: float) -> socket.socket:
    """Connect to the listener at `address`; waits for a path to appear. `where` begins every error.

    Raises ChannelTimeout if none listens in time, ChannelBroken if it has ended.
    """
    deadline = time.monotonic() + timeout_s
    if is_path(address) and not _wait_for_path(address, deadline):
        raise ChannelTimeout(f"{where}: waited {timeout_s:g} s, no writer listens at '{address}'; it was not made, or has all its readers")
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        if not is_path(address):
            return socket.create_connection(_host_and_port(address), timeout=left_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            set_deadline(sock, left_s)
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock
    except (BlockingIOError, TimeoutError) as error:
        raise ChannelTimeout(f"{where}: waited {timeout_s:g} s, the writer at '{address}' does not answer") from error
    except OSError as error:
        raise writer_gone_error(where, address, error) from error


def writer_gone_error(where: str, address: str, error: Exception, channel: str = "") -> ChannelBroken:
    """Make the error for a writer that ended before its reader connected."""
    broken = ChannelBroken(f"{where}: the writer at '{address}' is gone ({error or 'end of file'})")
    broken.channel, broken.host = channel, "" if is_path(address) else _host_and_port(address)[0]
    return broken


def tune(sock: socket.socket) -> None:
    """Set up a connection between hosts to send small messages at once, and to detect within seconds that the other host is lost.

    Keep-alive probes a silent peer every second. While bytes are in flight it sends no probe, and TCP would retransmit for a quarter of an
    hour: `link_watch` ends such a connection.
    """
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_S - 1)
    watch(sock)


def set_deadline(sock: socket.socket, timeout_s: float) -> None:
    """Let every blocking call on the socket fail with BlockingIOError after this many seconds; 0 means never."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def wait_readable(handles: Iterable[int], deadline: float) -> list[int]:
    """Wait until some handles can be read, and return them; none if the deadline passes first."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left_ms = math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
    return [handle for handle, _ in poll.poll(left_ms)]


def _wait_for_path(path: str, deadline: float) -> bool:
    """Wait for the path until the deadline, and return whether it exists. It sleeps in inotify, since `listen` renames a listener to it."""
    if os.path.exists(path):
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_CLOEXEC)
    if watch < 0:
        raise OSError(ctypes.get_errno(), "cannot make an inotify instance to wait for a writer")
    try:
        if libc.inotify_add_watch(watch, os.fsencode(os.path.dirname(path) or "."), _IN_MOVED_TO) < 0:
            raise OSError(ctypes.get_errno(), "cannot watch the folder of a writer's socket", path)
        while not os.path.exists(path):
            if not wait_readable([watch], deadline):
                return False
            os.read(watch, 65536)
        return True
    finally:
        os.close(watch)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


MAX_FRAME = 1 << 16  # bytes of a control message
STALL_S = 10.0  # a peer that stops in the middle of a frame, or does not read one, has failed
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding malformed bytes raises
_LENGTH = struct.Struct("!I")
_CHALLENGE, _PROOF = 32, 32  # bytes


class ProtocolError(OSError):
    """The peer broke the protocol."""


class Connection:
    """An authenticated connection; `encrypt` uses TLS if its peer is on another host.

    Raises AuthenticationError if the peer does not know the key, OSError if it has ended or is silent.
    """

    def __init__(self, sock: socket.socket, authkey: bytes, timeout_s: float, *, server: bool, encrypt: bool = False) -> None:
        self.pid, self.peer, self.host = _peer(sock)
        self.sends_on = False  # whether a relay at its other end sends the messages' bytes to another host
        fingerprint = b""
        if encrypt and sock.family != socket.AF_UNIX:
            sock, fingerprint = encrypt_socket(sock, timeout_s, server=server)
        tune(sock)
        self._socket: socket.socket | EncryptedSocket = EncryptedSocket(sock) if isinstance(sock, ssl.SSLSocket) else sock
        try:
            self._limit(timeout_s)
            self._shake_hands(authkey, server, fingerprint)
            self._limit(STALL_S)
        except BaseException:
            self._socket.close()
            raise

    @classmethod
    def pair(cls, peer: str, host: str) -> "tuple[Connection, Connection]":
        """Make the two ends of a connection inside this process, which stands for a connection to `peer` on another host."""
        ends = []
        for sock in socket.socketpair():
            end = cls.__new__(cls)
            end.pid, end.peer, end.host, end._socket, end.sends_on = 0, peer, host, sock, False
            set_deadline(sock, STALL_S)
            ends.append(end)
        return ends[0], ends[1]

    @property
    def local(self) -> bool:
        """Whether the peer is on this host, so that memory can be shared with it."""
        return self._socket.family == socket.AF_UNIX

    def _shake_hands(self, authkey: bytes, server: bool, fingerprint: bytes) -> None:
        """Exchange challenges and proofs. Each proof contains the role, so that it cannot be sent back.

        It also contains the fingerprint of the certificate, so that a man in the middle, who shows another one, cannot pass it on.
        """
        mine, theirs = (b"server", b"client") if server else (b"client", b"server")
        challenge = os.urandom(_CHALLENGE)
        self._socket.sendall(challenge)
        asked = self._read(_CHALLENGE)
        if not server:  # the server proves nothing to strangers
            self._socket.sendall(_proof(authkey, mine, asked + fingerprint))
        expected = _proof(authkey, theirs, challenge + fingerprint)
        if not hmac.compare_digest(self._read(_PROOF), expected):
            if server:
                self._socket.sendall(bytes(_PROOF))  # not the expected proof, so the client sees the refusal
            between = ", or somebody stands between the two ends, with a certificate of his own" if fingerprint else ""
            raise AuthenticationError(f"the peer does not know the key of this job{between}")
        if server:
            self._socket.sendall(_proof(authkey, mine, asked + fingerprint))

    def _limit(self, timeout_s: float) -> None:
        if isinstance(self._socket, EncryptedSocket):
            self._socket.timeout_s = timeout_s
        else:
            set_deadline(self._socket, timeout_s)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes, *, more: bool = False) -> None:
        """Send one frame. Raises OSError if the peer has ended, or reads nothing for some seconds.

        With `more` it is sent together with the bytes that follow at once: sent separately, it would wake the peer a second time.
        """
        self._socket.sendall(_LENGTH.pack(len(frame)) + frame, socket.MSG_MORE if more else 0)

    def wait(self) -> None:
        """Block until there is something to receive, or the peer has ended."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def receive(self, most: int = MAX_FRAME) -> bytes:
        """Receive the next frame. Raises EOFError at the end, ProtocolError for more than `most` bytes, OSError for half a frame."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most:
            raise ProtocolError(f"a frame of {length} bytes, where one has at most {most}")
        return self._read(length)

    def send_bytes(self, data: memoryview) -> None:
        """Send raw bytes, whose number the peer knows from the previous frame."""
        self._socket.sendall(data)

    def receive_into(self, memory: memoryview) -> None:
        """Fill the memory with raw bytes. Raises EOFError if the peer ends first."""
        while memory:
            # Read everything with one call: after each call, the thread waits for the interpreter.
            count = self._socket.recv_into(memory, 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            memory = memory[count:]

    def send_handle(self, handle: int) -> None:
        assert isinstance(self._socket, socket.socket)  # memory is shared only on one host
        socket.send_fds(self._socket, [b"\0"], [handle])

    def receive_handle(self) -> int:
        """Receive the file descriptor that follows a frame. Raises EOFError at the end, ProtocolError if there is none."""
        assert isinstance(self._socket, socket.socket)
        data, handles, _, _ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError
        if not handles:
            raise ProtocolError("no handle, where the slot's new memory was announced")
        return handles[0]

    @contextlib.contextmanager
    def deadline(self, timeout_s: float) -> Iterator[None]:
        """Let calls inside fail with BlockingIOError after so many seconds."""
        self._limit(timeout_s)
        yield
        self._limit(STALL_S)

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the connection down: both sides read end-of-file, after the bytes already sent."""
        with contextlib.suppress(OSError):  # the peer may have closed it first
            self._socket.shutdown(how)

    def close(self) -> None:
        self.end()  # wakes a thread that waits for this connection
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)


def _proof(authkey: bytes, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(authkey, role + challenge, "sha256")


def _peer(sock: socket.socket) -> tuple[int, str, str]:
    """The peer's process id (0 on another host), its name for errors, and the address of its host (empty on this one)."""
    if sock.family == socket.AF_UNIX:
        pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid, f"process {pid}", ""
    host, port = sock.getpeername()[:2]
    return 0, f"at {host}, port {port}", host


# The name of an address's network interface, which gloo and NCCL need.

ADDRESS_OF, MASK_OF = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def talk_at(address: str) -> None:
    """Have gloo and NCCL in this process use the interface of an address, unless the user has named one.

    By default they use the first interface, or resolve the host's name, which is a loopback address on many hosts.
    """
    name = interface_of(address)
    for variable in VARIABLES if name else ():
        os.environ.setdefault(variable, name)


def interface_of(address: str) -> str:
    """Find the interface that has an IPv4 address, or whose network contains it; empty if there is none.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    try:
        wanted = _number(socket.inet_aton(address))
    except OSError:
        return ""  # an IPv6 address
    around = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                own, mask = (_number(_request_answer(asking, what, name)) for what in (ADDRESS_OF, MASK_OF))
            except OSError:
                continue  # it has no IPv4 address
            if own == wanted:
                return name
            if own & mask == wanted & mask:
                around = around or name
    return around


def _request_answer(asking: socket.socket, what: int, name: str) -> bytes:
    return fcntl.ioctl(asking, what, struct.pack("256s", name.encode()))[20:24]


def _number(address: bytes) -> int:
    return int.from_bytes(address, "big")
