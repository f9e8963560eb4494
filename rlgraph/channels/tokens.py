"""The control path of host channels: small tokens over an authenticated Unix-domain socket, where death is an end-of-file."""

import contextlib
import ctypes
import math
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeAlias

import msgspec

from rlgraph.channels.base import Stop
from rlgraph.errors import ChannelError, ChannelTimeout

MAX_ADDRESS_BYTES = 107 - len(".new")  # sun_path of sockaddr_un, and what `listen` appends
MAX_REASON = 4000  # characters: the token that carries it still fits into one write
_IN_MOVED_TO = 0x80


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """Writer to reader, first of all: the slots of the channel."""

    slots: int


class Full(msgspec.Struct, tag="full", array_like=True):
    """Writer to reader: a slot holds a message. Where `segment` is not 0, a handle of that slot's new memory follows."""

    step: int
    slot: int
    header: int
    size: int
    segment: int


class Free(msgspec.Struct, tag="free", array_like=True):
    """Reader to writer: this reader is done with the slot."""

    slot: int


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True):
    """Either way: no further token comes."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """Either way: this end failed."""

    reason: str


Token: TypeAlias = Welcome | Full | Free | Goodbye | Failed
_decoder = msgspec.msgpack.Decoder(Token)


class Link:
    """An authenticated connection to one peer. Raises AuthenticationError or OSError if the peer fails the handshake."""

    def __init__(self, sock: socket.socket, authkey: bytes, timeout_s: float, *, server: bool) -> None:
        self.pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self._handle = sock.detach()
        self._connection: Connection = Connection(self._handle)
        try:
            with self._deadline(timeout_s):
                for step in (deliver_challenge, answer_challenge) if server else (answer_challenge, deliver_challenge):
                    step(self._connection, authkey)
        except BaseException:
            self._connection.close()
            raise

    def fileno(self) -> int:
        return self._handle

    def send(self, token: Token, handle: int | None = None) -> None:
        """Send a token, and a file descriptor after it. A peer that is gone is no error here: the next receive finds why."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(msgspec.msgpack.encode(token))
            if handle is not None:
                with self._socket() as sock:
                    socket.send_fds(sock, [b"\0"], [handle])

    def receive(self) -> Token | None:
        """Return the next token, or None at the end of the file."""
        try:
            return _decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def receive_welcome(self, timeout_s: float) -> Welcome:
        """Return the token that a writer sends first. Raises BlockingIOError if it stays silent, EOFError if it is gone."""
        with self._deadline(timeout_s):
            token = _decoder.decode(self._connection.recv_bytes())
        assert isinstance(token, Welcome), token
        return token

    def receive_handle(self) -> int | None:
        """Return the file descriptor that follows a token, or None at the end of the file."""
        with self._socket() as sock:
            handles = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
        return handles[0] if handles else None

    def close(self) -> None:
        with self._socket() as sock, contextlib.suppress(OSError):  # the peer may have gone first
            sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for this link; what was sent still arrives
        self._connection.close()

    def _socket(self) -> socket.socket:
        return socket.fromfd(self.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)

    @contextlib.contextmanager
    def _deadline(self, timeout_s: float) -> Iterator[None]:
        with self._socket() as sock:
            set_deadline(sock, timeout_s)
            yield
            set_deadline(sock, 0)


def set_deadline(sock: socket.socket, timeout_s: float) -> None:
    """Let every blocking call on the socket fail with BlockingIOError after so many seconds; 0 means never."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def check_address(channel: str, address: str) -> None:
    """Raise ChannelError for a path that no Unix-domain socket can have."""
    size = len(os.fsencode(address))
    if size > MAX_ADDRESS_BYTES:
        raise ChannelError(
            f"channel '{channel}': the socket path '{address}' has {size} bytes and may have {MAX_ADDRESS_BYTES}; "
            "put the folder of the job at a shorter path"
        )


def listen(channel: str, address: str, backlog: int) -> socket.socket:
    """Return a socket that listens at the path; the path appears only when it can be connected to.

    Raises ChannelError where another writer has the path.
    """
    if os.path.exists(address):
        raise ChannelError(f"channel '{channel}': '{address}' is taken; every channel of a job has a path of its own")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address + ".new")
    listener.listen(backlog)
    os.rename(address + ".new", address)
    return listener


def connect(channel: str, address: str, authkey: bytes, timeout_s: float) -> tuple[Link, Welcome]:
    """Return a link to the writer that listens at the path, and its welcome; waits for the path to appear.

    Raises ChannelTimeout when there is none after `timeout_s`, ChannelError when it refuses the key.
    """
    where = f"channel '{channel}', a reader"
    deadline = time.monotonic() + timeout_s
    if not _wait_for_path(address, deadline):
        raise ChannelTimeout(f"{where}: waited {timeout_s:g} s, no writer listens at '{address}'; it was not made, or has all its readers")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left_s = max(deadline - time.monotonic(), 0.001)
    set_deadline(sock, left_s)
    try:
        sock.connect(address)
        link = Link(sock, authkey, left_s, server=False)
        try:
            return link, link.receive_welcome(left_s)
        except BaseException:
            link.close()
            raise
    except BlockingIOError as error:
        raise ChannelTimeout(f"{where}: waited {timeout_s:g} s, the writer at '{address}' does not answer") from error
    except AuthenticationError as error:
        raise ChannelError(f"{where}: the writer at '{address}' refused the authkey; all ends of a job use one key") from error
    except (OSError, EOFError) as error:
        raise ChannelError(f"{where}: the writer at '{address}' is gone ({error or 'end of file'})") from error
    finally:
        sock.close()


def _wait_for_path(path: str, deadline: float) -> bool:
    """Return whether the path exists before the deadline; sleeps in inotify, since a listener is renamed into its place."""
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
            if not ready([watch], deadline):
                return False
            os.read(watch, 65536)
        return True
    finally:
        os.close(watch)


def ready(handles: Iterable[int], deadline: float) -> list[int]:
    """Block until some of the handles can be read, and return those; none when the deadline passes first."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left_ms = math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
    return [handle for handle, _ in poll.poll(left_ms)]


def stop(token: Token | None, who: str, link: Link) -> Stop:
    """Return why the peer sends no more, from its last token or the end of the file (None)."""
    who = f"{who} (process {link.pid})"
    if isinstance(token, Goodbye):
        return Stop(who)
    if isinstance(token, Failed):
        return Stop(who, f"failed: {token.reason}")
    assert token is None, token
    return Stop(who, "died: its connection ended without a goodbye")
