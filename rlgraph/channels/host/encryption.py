"""TLS on a connection between hosts. Certificates are not signed: the handshake with the job's key authenticates them.

The process that listens makes a certificate when it first needs one, and its private key never leaves the process. Python's `ssl` cannot
make one, nor can a package that Ray installs, so the command `openssl` does. Both ends then prove that they know the job's key over this
certificate's fingerprint (`connection`), as SCRAM does over `tls-server-end-point`: a man in the middle would show another certificate,
and the proofs would not match.
"""

import errno
import functools
import hashlib
import os
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from rlgraph.errors import ChannelError

T = TypeVar("T")
MAKE_S = 60.0  # for the certificate, on a busy machine
CURVE: Final = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
COMMAND: Final = f"openssl req -x509 {CURVE} -nodes -subj /CN=rlgraph -days 3650 -keyout /dev/stdout"


class EncryptedSocket:
    """A TLS connection with the calls of a blocking socket that `Connection` uses. One thread may send while another receives.

    OpenSSL allows one call at a time, so each call is made under a lock without blocking, and the waits are outside of the lock. Whatever
    one end sends in one call, the other receives completely before it waits again. So no decrypted byte is left when a thread polls the
    descriptor, and TLS 1.3 sends nothing else once session tickets are off.
    """

    family = socket.AF_INET

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self.timeout_s = 0.0  # without progress; 0 means forever
        self._tls, self._lock = tls, threading.Lock()
        tls.setblocking(False)

    def fileno(self) -> int:
        return self._tls.fileno()

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:
        """Send everything at once, and ignore the flags. Raises BlockingIOError if the peer reads nothing in time."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._retry_when_readable(functools.partial(self._tls.send, rest)) :]

    def recv_into(self, memory: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Receive at most one record, of 16 KiB, and ignore the flags; 0 at the end. Raises BlockingIOError if nothing arrives in time."""
        return self._retry_when_readable(functools.partial(self._tls.recv_into, memory))

    def shutdown(self, how: int) -> None:
        """Shut down the connection below TLS: `SSLSocket.shutdown` would read further bytes as plain text."""
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        self._tls.close()

    def _retry_when_readable(self, call: Callable[[], T]) -> T:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            poll = select.poll()
            poll.register(self._tls, wanted)
            if not poll.poll(self.timeout_s * 1000 or None):
                raise BlockingIOError(errno.EAGAIN, "the peer of an encrypted connection is silent")


def encrypt_socket(sock: socket.socket, timeout_s: float, *, server: bool) -> tuple[ssl.SSLSocket, bytes]:
    """Begin TLS on a new connection; return it, and the fingerprint of the certificate that this end has seen.

    Raises BlockingIOError for a silent peer, OSError for a peer without TLS; the socket is closed then.
    """
    context, fingerprint = _make_certificate() if server else (_client(), b"")
    sock.settimeout(timeout_s)
    try:
        tls = context.wrap_socket(sock, server_side=server)
    except TimeoutError as error:
        raise BlockingIOError(errno.EAGAIN, "the peer does not answer to TLS") from error
    finally:
        sock.close()  # `wrap_socket` took its descriptor over, unless it failed
    return tls, fingerprint or _fingerprint(tls.getpeercert(binary_form=True) or b"")


def check_encryption(channel: str, carrier: str | None) -> None:
    """Raise ChannelError for a channel with a carrier, and if this process cannot make a certificate."""
    if carrier is not None:
        raise ChannelError(f"channel '{channel}' must be encrypted, but its carrier '{carrier}' does not encrypt; leave the carrier out")
    _make_certificate()


@functools.cache
def _make_certificate() -> tuple[ssl.SSLContext, bytes]:
    """Make this process's certificate; return the TLS context of its listeners, and the fingerprint."""
    try:
        pem = subprocess.run(COMMAND.split(), capture_output=True, stdin=subprocess.DEVNULL, timeout=MAKE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ChannelError(
            f"encrypted connections need the command `openssl` on every host, which makes their certificates, and here it failed "
            f"({error}); install it, e.g. with `apt-get install openssl`"
        ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)  # `ssl` reads only files
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    begin = pem.index(b"-----BEGIN CERTIFICATE-----")
    return context, _fingerprint(ssl.PEM_cert_to_DER_cert(pem[begin:].decode()))


@functools.cache
def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proofs over its fingerprint authenticate it
    return context


def _fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()
