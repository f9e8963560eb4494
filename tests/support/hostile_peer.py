"""What a broken or hostile peer may send: malformed frames, control messages, headers, memory and columns, made from a seed."""

import os
import pickle
import random
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlgraph.channels import HostReader, HostWriter
from rlgraph.channels.host import protocol, slot_memory
from rlgraph.channels.host.connection import Connection, set_deadline
from rlgraph.channels.host.protocol import ControlMessage, Failed, Free, Full, Goodbye, More, Staged, Welcome
from rlgraph.channels.host.slot_memory import MappedMemory, new_segment
from rlgraph.errors import ChannelError, RlgraphError
from rlgraph.runtime import messages

CODE = {"pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "marshal.loads", "import"}
NUMBERS = [0, 1, -1, 2, 63, 64, 65, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]
STALLED_S = 0.05  # in earnest it is seconds that a peer may stop in the middle of a frame


class Bomb:
    """Unpickled, it would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo this must never run > /dev/null",)


BOMB = pickle.dumps(Bomb())


@dataclass
class Watch:
    """What Python was asked to do while malformed input was handled."""

    on: bool = False
    ran: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sys.addaudithook(self._heard)  # for ever: Python knows no way back

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in CODE:
            self.ran.append(f"{event} {arguments[:1]!r}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False


def value(dice: random.Random, depth: int = 0) -> Any:
    """Return any value that msgpack can carry."""
    kinds: list[Callable[[], Any]] = [
        lambda: dice.choice(NUMBERS),
        lambda: dice.choice([None, True, False, 0.0, float("nan"), float("inf"), -1.5]),
        lambda: "".join(chr(dice.choice([0, 65, 0x7F, 0xE9, 0x1F600])) for _ in range(dice.randrange(6))),
        lambda: dice.randbytes(dice.randrange(9)),
        lambda: dice.choice(["full", "free", "welcome", "goodbye", "failed", "tensor", "text", "device", "float32", "load", "Report"]),
        lambda: BOMB,
    ]
    if depth < 3:
        kinds.append(lambda: [value(dice, depth + 1) for _ in range(dice.randrange(6))])
        kinds.append(lambda: {str(i): value(dice, depth + 1) for i in range(dice.randrange(4))})
    return dice.choice(kinds)()


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, cut off, or more put in."""
    changed = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        where = dice.randrange(len(changed) + 1)
        match dice.randrange(4):
            case 0 if where < len(changed):
                changed[where] = dice.randrange(256)
            case 1:
                del changed[where : where + dice.randrange(1, 9)]
            case 2:
                changed[where:where] = dice.randbytes(dice.randrange(1, 9))
            case _ if where < len(changed):
                changed[where] ^= 1 << dice.randrange(8)
    return bytes(changed)


def control_message(dice: random.Random) -> bytes:
    """Make a control message that is wrong in some way, or is right in the wrong place."""
    fulls = [Full(0, 0, 10, 100, 4096), Full(0, 0, 10, 100, 4096, 0, 2), Full(0, 0, 10, 100, 4096, 50, awaited=60)]
    others: list[ControlMessage] = [Free(0), Goodbye(), Failed("why"), Welcome(2), Free(1), More(0, 1), Staged(0, 40)]
    valid = dice.choice([*fulls, *others])
    match dice.randrange(5):
        case 0:
            return mutated(dice, protocol.encode(valid))
        case 1:
            return msgspec.msgpack.encode(
                [dice.choice(["full", "free", "welcome", "failed", "goodbye", "more", "no"]), *(dice.choice(NUMBERS) for _ in range(5))]
            )
        case 2:
            return msgspec.msgpack.encode(value(dice))
        case 3:
            return dice.choice([BOMB, dice.randbytes(dice.randrange(40)), b""])
        case _:
            return protocol.encode(valid)


def header(dice: random.Random) -> bytes:
    """Return a message's header that lies about its columns."""

    def number() -> int:
        return dice.choice([*NUMBERS[:9], dice.choice(NUMBERS), 128, 192])

    name = dice.choice(["x", "", "responses", "\0"])
    dtype = dice.choice(["float32", "bool", "int64", "load", "Tensor", "__class__", "quint8", "complex128", ""])
    shape = [number() for _ in range(dice.randrange(4))]
    entries: list[Any] = [["tensor", name, dtype, shape, number(), dice.random() < 0.2] for _ in range(dice.randrange(1, 3))]
    entries += [["text", name, [str(value(dice, 3)) for _ in range(dice.randrange(3))]]] * dice.randrange(2)
    match dice.randrange(3):
        case 0:
            return msgspec.msgpack.encode(entries)
        case 1:
            return mutated(dice, msgspec.msgpack.encode(entries))
        case _:
            return msgspec.msgpack.encode(value(dice))


def message(dice: random.Random) -> bytes:
    """Return what a worker would never tell its driver."""
    valid = [
        messages.Hello("policy", 1),
        messages.Ready("policy"),
        messages.Failure("policy", 0, "update", "ValueError", "no", ""),
        messages.Go(3),
    ]
    match dice.randrange(4):
        case 0:
            return mutated(dice, msgspec.msgpack.encode(dice.choice(valid)))
        case 1:
            return msgspec.msgpack.encode(
                {"type": dice.choice(["Hello", "Report", "Go", "Stop", "No"]), "worker": value(dice), "step": value(dice)}
            )
        case 2:
            return msgspec.msgpack.encode(value(dice))
        case _:
            return dice.choice([BOMB, dice.randbytes(dice.randrange(60))])


def framed(dice: random.Random, data: bytes) -> bytes:
    """Return the bytes as a frame, now and then with a length that is not theirs."""
    length = len(data) if dice.random() < 0.85 else dice.choice([0, len(data) + 3, max(len(data) - 1, 0), 2**16, 2**16 + 1, 2**32 - 1])
    return struct.pack("!I", length) + data


def _pair(peer: str) -> tuple[Connection, Connection]:
    near, far = Connection.pair(peer, "")
    set_deadline(near._socket, STALLED_S)
    return near, far


def attack_reader(dice: random.Random) -> str:
    """Send malformed control messages, memory and messages to a reader; return how it took them."""
    near, far = _pair("a hostile writer")
    reader = _reader(near)
    try:
        far._socket.settimeout(1)
        for _ in range(dice.randrange(1, 4)):
            if dice.random() < 0.5:
                far._socket.sendall(framed(dice, control_message(dice)))
            else:
                _send_message(dice, far)
        if dice.random() < 0.9:
            far.end(socket.SHUT_WR)
        return outcome(lambda: _take_all(reader))
    except OSError:
        return "sender refused"
    finally:
        reader.close()
        far.close()


def _reader(near: Connection) -> HostReader:
    connect = protocol.connect
    protocol.connect = lambda *arguments, **options: (near, Welcome(2))
    try:
        return HostReader("edge", b"key", "/nowhere", 1)
    finally:
        protocol.connect = connect


def _take_all(reader: HostReader) -> None:
    for step in range(3):
        reader.take(step, 0.02)
        reader.release()


def _send_message(dice: random.Random, far: Connection) -> None:
    """Send a control message that announces memory, and the memory, either of which may be wrong."""
    head = header(dice)
    handle, segment = new_segment("edge", 4096)
    if dice.random() < 0.2:  # memory that could shrink under the reader's hands
        os.close(handle)
        handle = os.memfd_create("edge")
        os.ftruncate(handle, dice.choice([0, 1, 4096]))
    elif len(head) <= len(segment):
        segment[: len(head)] = head
    try:
        said = dice.choice([4096, 4096, 4096, *NUMBERS])
        size = dice.choice([4096, 4096, len(head), 2**40])
        full = ["full", dice.choice([0, 0, 1, 2]), dice.choice([0, 1, 0, 64]), dice.choice([len(head), len(head), 0, 5000]), size, said]
        far._socket.sendall(framed(dice, msgspec.msgpack.encode(full)))
        if dice.random() < 0.9:
            socket.send_fds(far._socket, [b"\0"], [handle])
    finally:
        os.close(handle)


def attack_writer(dice: random.Random) -> str:
    """Send malformed control messages to a writer; return how it took them."""
    near, far = _pair("a hostile reader")
    writer = HostWriter("edge", 2, 1, b"key", f"{tempfile.gettempdir()}/rlgraph-fuzz-{os.getpid()}-{os.urandom(6).hex()}")
    writer._acceptor.connections.append(near)
    try:
        for _ in range(dice.randrange(1, 4)):
            far._socket.sendall(framed(dice, control_message(dice)))
        if dice.random() < 0.9:
            far.end(socket.SHUT_WR)

        def put() -> None:
            for step in range(3):
                writer.put(step, {}, 0.02)

        return outcome(put)
    finally:
        writer.close()
        writer._acceptor._close_listeners()  # the acceptor believes that it accepted this reader
        far.close()


def read_layout(dice: random.Random) -> str:
    """Read a slot whose header lies."""
    head = header(dice)
    handle, segment = new_segment("edge", 4096)
    os.close(handle)
    segment[: len(head[:4096])] = head[:4096]
    try:
        slot_memory.read(segment, min(len(head), 4096), dice.choice([4096, 100, len(head)]), MappedMemory())
    except slot_memory.Malformed:
        return "rejected"
    return "taken as valid"


def attack_driver(dice: random.Random) -> str:
    """Send a malformed message to the driver."""
    near, far = _pair("a hostile worker")
    try:
        far._socket.sendall(framed(dice, message(dice)))
        far.end(socket.SHUT_WR)
        messages.receive(near)
    except (EOFError, OSError):
        return "rejected"
    finally:
        near.close()
        far.close()
    return "taken as valid"


def attack_handshake(dice: random.Random, key: bytes = b"key") -> str:
    """Offer a handshake of noise."""
    near, far = socket.socketpair()
    with far:
        far.sendall(dice.randbytes(dice.choice([0, 1, 31, 32, 33, 64, 96, 500])))
        far.shutdown(socket.SHUT_WR)
        try:
            Connection(near, key, 1.0, server=dice.random() < 0.5).close()
        except (OSError, EOFError, Exception) as error:  # noqa: BLE001 (which one it is, is what is looked at)
            return "rejected" if type(error).__name__ in ("AuthenticationError", "EOFError", "BrokenPipeError") else repr(error)
    return "LET IN"


def outcome(work: Callable[[], Any]) -> str:
    try:
        work()
    except ChannelError as error:
        return type(error).__name__
    except RlgraphError as error:
        return f"UNEXPECTED {error!r}"
    return "taken as valid"


TARGETS: dict[str, Callable[[random.Random], str]] = {
    "handshake": attack_handshake,
    "control messages and memory to a reader": attack_reader,
    "control messages to a writer": attack_writer,
    "headers in a slot": read_layout,
    "messages to the driver": attack_driver,
}


def attack(name: str, cases: int, seed: int) -> Counter[str]:
    """Return how often a target took malformed input in which way. What is no outcome of a channel raises."""
    dice = random.Random(f"{name} {seed}")
    return Counter(TARGETS[name](dice) for _ in range(cases))
