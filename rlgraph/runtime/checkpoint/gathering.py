"""Checkpoints of hosts without a shared folder: workers send shards to the driver's folder, and fetch files of a resume from it.

The driver listens at its own address while a session with checkpoints runs over several hosts. A worker that does not see the folder writes
its shard on its own host, sends it over a connection authenticated with the job's key, and removes it. The driver answers when a file is on
its disk with the worker's checksum; only then does the worker send `Saved`. So checkpoints are atomic.
"""

import contextlib
import fcntl
import hashlib
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import BufferedReader, RawIOBase
from multiprocessing import AuthenticationError
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import msgspec

from rlgraph.channels.host.connection import UNREADABLE, Connection, ProtocolError, bound, close_listener, dial, listen
from rlgraph.errors import CheckpointError
from rlgraph.runtime.checkpoint.store import sync
from rlgraph.runtime.checkpoint.worker_snapshot import OnWritten, describe_missing_folder, free, read_shards, unfinished_name
from rlgraph.runtime.messages import Written
from rlgraph.runtime.worker.spec import Resume, WorkerSpec, file_name

CHUNK = 1 << 20  # bytes of a file in memory
STALL_S = 120.0  # for the next bytes: a disk that is flushing its cache may accept none for long
HANDSHAKE_S = 10.0
CLOSE_S = 5.0  # for what is being written when the session ends
MANIFEST = ("manifest.json", "manifest.sha256")


class Offer(msgspec.Struct, tag=True, frozen=True):
    """A file of the checkpoint after `step` steps, whose bytes follow."""

    step: int
    file: Written


class Wish(msgspec.Struct, tag=True, frozen=True):
    """Send a file of the checkpoint from which the session resumes."""

    path: str


class Receipt(msgspec.Struct, tag=True, frozen=True):
    """The file is on the driver's disk, or its `bytes` follow; otherwise the reason why not."""

    refused: str = ""
    bytes: int = 0


Message: TypeAlias = Offer | Wish | Receipt
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def _send(connection: Connection, message: Message) -> None:
    connection.send(_encoder.encode(message))


def _receive(connection: Connection) -> Message:
    connection.wait()  # no deadline while the peer lives: a disk may be slow
    try:
        return _decoder.decode(connection.receive())
    except UNREADABLE as error:
        raise ProtocolError(f"bytes that are not a message ({error})") from error


class Gatherer:
    """The driver's end: it receives the files of unfinished checkpoints, and sends the files of the checkpoint to resume from."""

    def __init__(self, address: str, authkey: bytes, folder: Path, id: str, resume: Path | None, *, encrypt: bool) -> None:
        self._key, self._folder, self._id, self._resume, self._encrypt = authkey, folder, id, resume, encrypt
        self._listener = listen("checkpoints", f"{address}:0", backlog=64)
        self.address = bound(self._listener)
        self._lock, self._over = threading.Lock(), False
        self._open: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept, name="gather checkpoints", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections; an incomplete file stays in the folder of an unfinished checkpoint."""
        close_listener(self._listener, self.address)
        with self._lock:
            self._over = True
            for connection in self._open:
                connection.end()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), name="gather a checkpoint", daemon=True)
            self._threads = [*(known for known in self._threads if known.is_alive()), thread]
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger, or a worker that has ended
            connection = Connection(sock, self._key, HANDSHAKE_S, server=True, encrypt=self._encrypt)
            with self._lock:
                if self._over:
                    connection.close()
                    return
                self._open.append(connection)
            try:
                while True:
                    self._answer(connection, _receive(connection))
            finally:
                with self._lock:
                    self._open.remove(connection)
                connection.close()

    def _answer(self, connection: Connection, message: Message) -> None:
        with connection.deadline(STALL_S):
            if isinstance(message, Offer):
                _send(connection, Receipt(self._take(connection, message)))
            elif isinstance(message, Wish):
                self._give(connection, message)
            else:
                raise ProtocolError("an answer, where the driver has asked for nothing")

    def _take(self, connection: Connection, offer: Offer) -> str:
        """Write an offered file, and return what was wrong with it. All its bytes are read, since the next message follows them."""
        target, trouble, file = _inside(self._folder / unfinished_name(self._id, offer.step), offer.file.path), "", None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("wb", buffering=0)
        except OSError as error:
            trouble = str(error)
        with contextlib.ExitStack() as opened:
            if file is not None:
                opened.enter_context(file)
            found, late = _receive_file(connection, offer.file.bytes, file)
            trouble = trouble or late or ("" if found == offer.file.sha256 else "other bytes arrived than were sent")
            if file is not None and not trouble:
                try:
                    os.fsync(file.fileno())
                    sync(target.parent)
                except OSError as error:
                    trouble = str(error)
        return f"{trouble}{free(str(self._folder))}" if trouble else ""

    def _give(self, connection: Connection, wish: Wish) -> None:
        if self._resume is None:
            raise ProtocolError("a request for a file, in a session that resumes from nothing")
        asked = _inside(self._resume, wish.path)
        try:
            file = asked.open("rb")
        except OSError as error:
            _send(connection, Receipt(str(error)))
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            _send(connection, Receipt(bytes=size))
            _send_file(connection, file, size)


class DriverFolder:
    """A worker's end of a `Gatherer`: one connection for the length of the `with` block."""

    def __init__(self, address: str, authkey: bytes, timeout_s: float, *, encrypt: bool) -> None:
        sock = dial("checkpoints", address, timeout_s)
        self._connection = Connection(sock, authkey, timeout_s, server=False, encrypt=encrypt)

    @classmethod
    def of(cls, spec: WorkerSpec) -> "DriverFolder":
        assert spec.saving is not None
        return cls(spec.saving.gatherer, spec.authkey, spec.deadline_s, encrypt=spec.encrypt)

    def __enter__(self) -> "DriverFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def send(self, step: int, folder: Path, written: Sequence[Written]) -> None:
        """Send files of a checkpoint, and wait until each is on the driver's disk. Raises CheckpointError if one could not be written."""
        for file in written:
            _send(self._connection, Offer(step, file))
            with (folder / file.path).open("rb") as data, self._connection.deadline(STALL_S):
                _send_file(self._connection, data, file.bytes)
            self._request(file.path)

    def fetch(self, path: str, into: Path, sha256: str = "") -> None:
        """Copy a file of the checkpoint to resume from, unless it exists already. Raises CheckpointError if it arrives damaged."""
        target = _inside(into, path)
        if target.exists():
            return
        _send(self._connection, Wish(path))
        size = self._request(path).bytes
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f"{target.name}.half")
        with half.open("wb", buffering=0) as file, self._connection.deadline(STALL_S):
            found, trouble = _receive_file(self._connection, size, file)
        if sha256 and found != sha256:
            trouble = trouble or "other bytes arrived than were saved"
        if trouble:
            raise CheckpointError(f"'{path}' of a checkpoint could not be copied to host '{socket.gethostname()}': {trouble}")
        half.rename(target)

    def _request(self, path: str) -> Receipt:
        answer = _receive(self._connection)
        if not isinstance(answer, Receipt):
            raise ProtocolError("no answer, where the driver was asked")
        if answer.refused:
            raise CheckpointError(f"the driver's host could not receive or send '{path}': {answer.refused}")
        return answer


def _receive_file(connection: Connection, size: int, file: RawIOBase | None) -> tuple[str, str]:
    """Write the incoming bytes into a file; return their checksum, and the disk's error if there was one.

    A thread computes the checksum of one chunk while the next arrives and is written: the checksum lasts as long as both.
    """
    chunks, found, trouble, left = [memoryview(bytearray(min(CHUNK, size))) for _ in range(2)], hashlib.sha256(), "", size
    with ThreadPoolExecutor(1) as hashing:
        hashed: list[Future[object]] = [hashing.submit(object)] * 2
        while left:
            hashed[0].result()
            chunk = chunks[0][: min(left, CHUNK)]
            connection.receive_into(chunk)
            left -= len(chunk)
            hashed = [hashed[1], hashing.submit(found.update, chunk)]
            chunks.reverse()
            while chunk and file is not None and not trouble:
                try:
                    chunk = chunk[file.write(chunk) :]
                except OSError as error:  # a full disk: the remaining bytes are read and dropped
                    trouble = str(error)
    return found.hexdigest(), trouble


def _send_file(connection: Connection, file: BufferedReader, size: int) -> None:
    memory, left = memoryview(bytearray(min(CHUNK, size))), size
    while left:
        count = file.readinto(memory[: min(left, CHUNK)])
        if not count:
            raise ProtocolError("a file became shorter while it was sent")
        connection.send_bytes(memory[:count])
        left -= count


def _inside(folder: Path, path: str) -> Path:
    """Find a file in a folder. Raises ProtocolError for a path outside of it."""
    parts = PurePosixPath(path).parts
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts:
        raise ProtocolError(f"the path {path!r}, which leads out of a checkpoint")
    return folder.joinpath(*parts)


def use_job_folder(spec: WorkerSpec) -> WorkerSpec:
    """Let a worker whose host does not see the driver's folder use the job's folder on its own host.

    Raises CheckpointError if that does not help: on one host, or for a checkpoint that cannot be fetched.
    """
    saving = spec.saving
    if saving is None or not (found := describe_missing_folder(saving)):
        return spec
    if not saving.gatherer:
        raise CheckpointError(f"the checkpoint folder '{saving.folder}' is not the driver's ({found}); pass one that all hosts share")
    of_host = Path(spec.folder) / "checkpoints"
    own = of_host / file_name(spec.worker.name)
    own.mkdir(parents=True, exist_ok=True)
    spec = replace(spec, saving=replace(saving, folder=str(own), apart=True))
    return replace(spec, resume=_fetch_checkpoint(spec, spec.resume, of_host)) if spec.resume else spec


def _fetch_checkpoint(spec: WorkerSpec, resume: Resume, of_host: Path) -> Resume:
    """Copy the files of a checkpoint that a worker reads to its host. Workers of one host take turns, so that each file is sent once."""
    folder = of_host / ".resumed"
    folder.mkdir(exist_ok=True)
    with (of_host / ".lock").open("w") as lock, DriverFolder.of(spec) as driver:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in MANIFEST:
            driver.fetch(name, folder)
        for shard in read_shards(folder):
            if set(shard.nodes) == set(spec.worker.nodes):
                for file in shard.written:
                    driver.fetch(file.path, folder, file.sha256)
    return Resume(str(folder), resume.step)


def make_sender(spec: WorkerSpec) -> OnWritten:
    """Make the function that brings a written shard to the driver's folder. It does nothing if the shard is already there."""

    def send(step: int, folder: Path, written: Sequence[Written]) -> None:
        with DriverFolder.of(spec) as driver:
            driver.send(step, folder, written)

    return send if spec.saves_remotely else lambda *_: None
