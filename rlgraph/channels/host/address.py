"""Addresses of connections: a path in a folder of the job on one host, `address:port` between hosts."""

import contextlib
import ctypes
import errno
import math
import os
import select
import socket
import struct
import time
from collections.abc import Iterable

from rlgraph.channels.host.link_watch import LOST_S, watch
from rlgraph.errors import ChannelBroken, ChannelError, ChannelTimeout

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

    Port 0 takes a free port. Raises ChannelError if another writer has the path or the port.
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
            errno.EADDRNOTAVAIL: "no network interface of this host has that address; give one of its own",
            errno.EACCES: "this user may not take that port; choose one above 1023",
        }.get(error.errno or 0, "choose another address")
        raise ChannelError(f"channel '{channel}' cannot listen at '{address}': {error.strerror}; {advice}") from error
    return listener


def _listen_at_path(channel: str, address: str, backlog: int) -> socket.socket:
    if os.path.exists(address):
        raise ChannelError(f"channel '{channel}': '{address}' is taken; every channel of a job has a path of its own")
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
    return name if isinstance(name, str) else _joined(*name[:2])


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

    Raises ChannelTimeout if none listens in time, ChannelBroken if it is gone.
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
        raise gone(where, address, error) from error


def gone(where: str, address: str, error: Exception, channel: str = "") -> ChannelBroken:
    """Make the error for a writer that is gone before its reader has joined it."""
    broken = ChannelBroken(f"{where}: the writer at '{address}' is gone ({error or 'end of file'})")
    broken.channel, broken.host = channel, "" if is_path(address) else _host_and_port(address)[0]
    return broken


def tune(sock: socket.socket) -> None:
    """Between hosts: send small messages at once, and notice within seconds that the other host is gone.

    Keep-alive asks a silent peer every second. With bytes under way it asks nothing, and TCP would retransmit for a quarter of an hour:
    `link_watch` ends such a connection.
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
    """Let every blocking call on the socket fail with BlockingIOError after so many seconds; 0 means never."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def ready(handles: Iterable[int], deadline: float) -> list[int]:
    """Wait until some of the handles can be read, and return these; none if the deadline passes first."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left_ms = math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
    return [handle for handle, _ in poll.poll(left_ms)]


def _wait_for_path(path: str, deadline: float) -> bool:
    """Wait for the path until the deadline, and return whether it exists. It sleeps in inotify: a listener is renamed into its place."""
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


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
