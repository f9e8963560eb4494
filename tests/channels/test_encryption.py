"""Channels between hosts by TLS: what passes on the wire, and who is let in."""

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from rlgraph.channels import HostReader, HostWriter
from rlgraph.channels.host import encryption, protocol
from rlgraph.channels.host.connection import Connection
from rlgraph.errors import ChannelBroken, ChannelError

pytestmark = pytest.mark.openssl

LONG = 20.0
HERE = "127.0.0.1:0"
NAME = b"a column of this name"
PAYLOAD = bytes(range(1, 251)) * 1000


@dataclass
class Wire:
    """Stands between the two ends, sees all that passes, and may wrap each of its two connections."""

    to: str
    towards_reader: Callable[[socket.socket], socket.socket] = lambda sock: sock
    towards_writer: Callable[[socket.socket], socket.socket] = lambda sock: sock
    to_reader: bytearray = field(default_factory=bytearray)  # what passed, a record for each direction: the two run at once
    to_writer: bytearray = field(default_factory=bytearray)

    @property
    def seen(self) -> bytes:
        """All that passed."""
        return bytes(self.to_reader + self.to_writer)

    @contextmanager
    def tapped(self) -> Iterator[str]:
        """Give the address to connect to in place of the writer's."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=self._carry, args=(listener,), daemon=True)
            thread.start()
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(LONG)
        assert not thread.is_alive()

    def _carry(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        host, port = self.to.split(":")
        with self.towards_reader(near) as reader, self.towards_writer(socket.create_connection((host, int(port)))) as writer:
            ways = ((reader, writer, self.to_writer), (writer, reader, self.to_reader))
            threads = [threading.Thread(target=self._pass, args=way, daemon=True) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)

    def _pass(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)
            socket.socket.shutdown(target, socket.SHUT_WR)
        except OSError:
            pass  # the end there has gone first


def sent_through(wire_to: Callable[[str], Wire], *, encrypt: bool) -> bytes:
    """Send the payload through a wire and return what was seen there."""
    writer = HostWriter("edge", 2, 1, b"key", HERE, encrypt=encrypt)
    wire = wire_to(writer.address)
    with wire.tapped() as address:
        reader = HostReader("edge", b"key", address, LONG, encrypt=encrypt)
        for step in range(3):
            writer.put(step, {NAME.decode(): torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8), "text": ["ä"]}, LONG)
            assert bytes(reader.take(step, LONG)[NAME.decode()].tolist()) == PAYLOAD
            reader.release()
        writer.close()
        reader.close()
    return wire.seen


def test_what_is_sent_is_on_the_wire_in_plain_only_without_encryption():
    plain, secret = (sent_through(Wire, encrypt=encrypt) for encrypt in (False, True))
    assert (plain.count(PAYLOAD), NAME in plain) == (3, True)
    assert len(secret) > 3 * len(PAYLOAD)
    assert NAME not in secret
    assert not any(PAYLOAD[at : at + 16] in secret for at in range(250))


def test_one_who_stands_between_with_a_certificate_of_his_own_is_refused_by_both_ends():
    def served(sock: socket.socket) -> ssl.SSLSocket:
        return encryption._make_certificate.__wrapped__()[0].wrap_socket(sock, server_side=True)

    writer = HostWriter("edge", 1, 1, b"key", HERE, encrypt=True)
    between = Wire(writer.address, served, lambda sock: encryption._client().wrap_socket(sock))
    with (
        between.tapped() as address,
        pytest.raises(ChannelError, match=r"refused the authkey.*somebody stands between the two ends, with a certificate of his own"),
    ):
        HostReader("edge", b"key", address, LONG, encrypt=True)
    reader = HostReader("edge", b"key", writer.address, LONG, encrypt=True)  # the place was kept for the true one
    writer.put(0, {"x": torch.ones(3)}, LONG)
    assert reader.take(0, LONG)["x"].tolist() == [1, 1, 1]
    writer.close()
    reader.close()


def test_an_encrypted_channel_refuses_another_key_and_a_peer_that_does_not_encrypt():
    writer = HostWriter("edge", 1, 1, b"key", HERE, encrypt=True)
    with pytest.raises(ChannelError, match="refused the authkey"):
        HostReader("edge", b"another", writer.address, LONG, encrypt=True)
    with pytest.raises((ChannelBroken, ChannelError)):
        HostReader("edge", b"key", writer.address, LONG)
    assert not writer._acceptor.connections
    writer.close()


def test_a_reader_that_encrypts_says_nothing_in_plain_to_a_writer_that_does_not():
    writer = HostWriter("edge", 1, 1, b"key", HERE)
    with pytest.raises(ChannelBroken, match=r"the writer at '.*' is gone"):
        HostReader("edge", b"key", writer.address, LONG, encrypt=True)
    writer.close()


def test_encryption_leaves_the_sockets_of_one_host_as_they_are(tmp_path):
    writer = HostWriter("edge", 1, 1, b"key", str(tmp_path / "edge"), encrypt=True)
    reader = HostReader("edge", b"key", writer.address, LONG, encrypt=True)
    writer.put(0, {"x": torch.ones(3)}, LONG)
    assert reader.take(0, LONG)["x"].tolist() == [1, 1, 1]
    assert isinstance(reader._connection._socket, socket.socket)
    writer.close()
    reader.close()


def test_a_carrier_cannot_be_encrypted():
    with pytest.raises(ChannelError, match="'gloo' does not encrypt"):
        HostWriter("edge", 1, 1, b"key", HERE, "gloo", encrypt=True)


def test_a_host_without_openssl_is_told_so(monkeypatch):
    encryption._make_certificate.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(encryption, "COMMAND", "no-such-openssl req")
    with pytest.raises(ChannelError, match=r"need the command `openssl` on every host.*no-such-openssl.*apt-get install openssl"):
        HostWriter("edge", 1, 1, b"key", HERE, encrypt=True)


def test_every_process_has_a_certificate_of_its_own():
    script = "from rlgraph.channels.host import encryption; print(encryption._make_certificate()[1].hex())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert other != encryption._make_certificate()[1].hex()


def pair_of_connections() -> tuple[Connection, Connection]:
    found: list[Connection] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: found.append(Connection(listener.accept()[0], b"key", LONG, server=True, encrypt=True)))
        thread.start()
        client = Connection(socket.create_connection(listener.getsockname()), b"key", LONG, server=False, encrypt=True)
        thread.join()
    return found[0], client


def test_a_thread_that_waits_to_receive_does_not_keep_another_from_sending_and_no_frame_stays_unseen():
    server, client = pair_of_connections()
    got: list[bytes] = []

    def receive() -> None:
        for _ in range(200):
            client.wait()  # on the descriptor: a frame that is decrypted already would not wake it
            got.append(client.receive(1 << 20))

    thread = threading.Thread(target=receive)
    thread.start()
    frames = [bytes([n]) * (n * 331 % 70_000) for n in range(200)]
    for n, frame in enumerate(frames):
        client.send(frame[:100])
        server.send(frame)
        assert server.receive() == frame[:100], n
    thread.join(LONG)
    assert got == frames
    for end in (server, client):
        end.close()


def test_half_a_frame_on_an_encrypted_connection_is_a_silent_peer():
    server, client = pair_of_connections()
    server._socket.sendall(b"\0\0")
    with client.deadline(0.05), pytest.raises(BlockingIOError):
        client.receive()
    server.close()
    with pytest.raises(EOFError):
        client.receive()
    assert isinstance(protocol.receive(client), protocol.Disconnected)
    client.close()
