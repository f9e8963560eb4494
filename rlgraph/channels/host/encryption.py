"""TLS on a connection between hosts. Nobody signs the certificates: the handshake with the job's key vouches for them.

The process that listens makes a certificate for itself when it first needs one, and its private key never leaves it. Python's `ssl` cannot
make one and Ray brings no package that can, so the command `openssl` does. Both ends then prove that they know the job's key over that
certificate's fingerprint (`connection`), as SCRAM does over `tls-server-end-point`: one who stands between them would have to show a
certificate of his own, and the proofs would not fit.
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

    OpenSSL allows one call at a time, so each is made without blocking, under a lock, and the waiting is done outside of it. What one end
    sends by one call, the other receives whole before it waits again. So no decrypted byte is left over when a thread polls the
    descriptor, and TLS 1.3 sends nothing else once session tickets are off.
    """

    family = socket.AF_INET

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self.timeout_s = 0.0  # without progress; 0 means for ever
        self._tls, self._lock = tls, threading.Lock()
        tls.setblocking(False)

    def fileno(self) -> int:
        return self._tls.fileno()

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:
        """Send all of it at once, whatever the flags say. Raises BlockingIOError if the peer takes nothing in time."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._retry_when_readable(functools.partial(self._tls.send, rest)) :]

    def recv_into(self, memory: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Receive at most one record, of 16 KiB, whatever the flags say; 0 at the end. Raises BlockingIOError if nothing comes in time."""
        return self._retry_when_readable(functools.partial(self._tls.recv_into, memory))

    def shutdown(self, how: int) -> None:
        """Shut the connection below TLS down: `SSLSocket.shutdown` would read what still comes as plain text."""
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

    Raises BlockingIOError for a peer that is silent, OSError for one that speaks no TLS. The socket is closed then.
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
        raise ChannelError(f"channel '{channel}' is to be encrypted, and its carrier '{carrier}' encrypts nothing; give it no carrier")
    _make_certificate()


@functools.cache
def _make_certificate() -> tuple[ssl.SSLContext, bytes]:
    """Make this process's certificate: the context of those who listen, and its fingerprint."""
    try:
        pem = subprocess.run(COMMAND.split(), capture_output=True, stdin=subprocess.DEVNULL, timeout=MAKE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ChannelError(
            f"encrypted connections need the command `openssl` on every host, which makes their certificates, and here it failed "
            f"({error}); install it, as by `apt-get install openssl`"
        ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)  # `ssl` reads files alone
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
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proofs over its fingerprint check it
    return context


def _fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()
