"""A connection to one peer that knows the job's key: framed bytes, handles of files, a deadline for each call. Never pickle.

Both sides prove that they know the key, by HMAC over the other's random challenge and their own role, before anything else
is read; on an encrypted connection also over the certificate that they see. What a peer sends is bytes of a known length;
`protocol` and `runtime.messages` check what they mean.
"""

import contextlib
import hmac
import os
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from multiprocessing import AuthenticationError

import msgspec

from rlgraph.channels.host.address import set_deadline, tune
from rlgraph.channels.host.encryption import EncryptedSocket, encrypted

MAX_FRAME = 1 << 16  # bytes of a control message
STALL_S = 10.0  # a peer that stops in the middle of a frame, or does not take one, has failed
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding malformed bytes raises
_LENGTH = struct.Struct("!I")
_CHALLENGE, _PROOF = 32, 32  # bytes


class ProtocolError(OSError):
    """The peer broke the protocol."""


class Connection:
    """An authenticated connection, with `encrypt` by TLS if its peer is on another host.

    Raises AuthenticationError if the peer does not know the key, OSError if it is gone or silent.
    """

    def __init__(self, sock: socket.socket, authkey: bytes, timeout_s: float, *, server: bool, encrypt: bool = False) -> None:
        self.pid, self.peer, self.host = _peer(sock)
        self.sends_on = False  # whether a relay at its other end sends the bytes of messages to another host
        fingerprint = b""
        if encrypt and sock.family != socket.AF_UNIX:
            sock, fingerprint = encrypted(sock, timeout_s, server=server)
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
        """Make the two ends of a connection inside this process, in place of one to `peer` on another host."""
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
        """Exchange challenges and proofs; each role proves itself by its own name, so that no proof can be sent back.

        With the fingerprint of the certificate, none can be passed on either, by one who shows a certificate of his own.
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
                self._socket.sendall(bytes(_PROOF))  # not the proof that the client expects, so it learns of the refusal
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
        """Send one frame. Raises OSError if the peer is gone or takes nothing for some seconds.

        With `more` it leaves with the bytes that follow at once: alone it would wake the peer once more: 16 MiB took 5.3 ms, not 4.9.
        """
        self._socket.sendall(_LENGTH.pack(len(frame)) + frame, socket.MSG_MORE if more else 0)

    def wait(self) -> None:
        """Block until there is something to receive, or the peer is gone."""
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
        """Send raw bytes, whose number the peer knows from the frame before."""
        self._socket.sendall(data)

    def receive_into(self, memory: memoryview) -> None:
        """Fill the memory with raw bytes. Raises EOFError if the peer ends first."""
        while memory:
            # All of it by one call: after each, a thread waits for the interpreter.
            count = self._socket.recv_into(memory, 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            memory = memory[count:]

    def send_handle(self, handle: int) -> None:
        assert isinstance(self._socket, socket.socket)  # memory is shared on one host alone
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
        with contextlib.suppress(OSError):  # the peer may have gone first
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
