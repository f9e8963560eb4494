"""The control path of host channels: small messages over an authenticated socket. The death of a peer reads as end-of-file."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Annotated, Literal, TypeAlias

import msgspec

from rlgraph.channels.api import MAX_SLOTS, Stop
from rlgraph.channels.host.connection import UNREADABLE, Connection, dial, writer_gone_error
from rlgraph.channels.host.slot_memory import Handle, Segment
from rlgraph.errors import ChannelError, ChannelTimeout, show_value

MAX_REASON = 4000  # characters, so that the message still fits into one write
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
CarrierName: TypeAlias = Literal["nccl", "gloo"]  # the library that sends columns on a GPU between hosts
Slot: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]


class Welcome(msgspec.Struct, tag="welcome", array_like=True, forbid_unknown_fields=True):
    """Writer to reader, as the first message: the channel's number of slots, and the library that sends its columns on a GPU, if any."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    carrier: CarrierName | None = None


class KeyValue(msgspec.Struct, tag="key_value", array_like=True, forbid_unknown_fields=True):
    """Both directions, before the first slot is full: an entry of the store with which two ends set up their communicator."""

    key: str
    value: bytes


class Full(msgspec.Struct, tag="full", array_like=True, forbid_unknown_fields=True):
    """Writer to reader: a slot holds the columns of a step. If `segment` is not 0, a handle of the slot's new memory follows.

    A communicator sends `carried` bytes of it separately, once the reader's host requests them. `coming` tensors of it are still being
    written, one after another; `More` reports the progress. A host that passes the carried bytes on may still wait for some of them, and
    `Staged` reports its progress. If `memory` is not 0, a reader on the same host maps the carried bytes again: with its handle on a GPU,
    or with a handle that follows, as this many bytes of host memory.
    """

    step: int
    slot: Slot
    header: Size
    size: Size
    segment: Size
    carried: Size = 0
    coming: Size = 0
    memory: Handle | Size = 0
    awaited: Size = 0


class More(msgspec.Struct, tag="more", array_like=True, forbid_unknown_fields=True):
    """Writer to reader: the first `tensors` tensors of the slot have arrived."""

    slot: Slot
    tensors: Size


class Portion(msgspec.Struct, tag="portion", array_like=True, forbid_unknown_fields=True):
    """Writer to its relay: the first `bytes` bytes of the slot are written, and with them the first `tensors` tensors.

    Between two relays the bytes that no earlier part had follow.
    """

    slot: Slot
    bytes: Size
    tensors: Size


class Staged(msgspec.Struct, tag="staged", array_like=True, forbid_unknown_fields=True):
    """Relay to relay: the first `bytes` of the slot's `carried` bytes have arrived at the host that passes them on."""

    slot: Slot
    bytes: Size


class Posted(msgspec.Struct, tag="posted", array_like=True, forbid_unknown_fields=True):
    """Reader's relay to writer's relay: it has posted a receive of `carried` bytes, from the end of the last receive up to `bytes`."""

    slot: Slot
    bytes: Size


class Arrived(msgspec.Struct, tag="arrived", array_like=True, forbid_unknown_fields=True):
    """Reader's relay to writer's relay: the slot's `carried` bytes have arrived, so the writer's end may close."""

    slot: Slot


class Free(msgspec.Struct, tag="free", array_like=True, forbid_unknown_fields=True):
    """Reader to writer: this reader has released the slot."""

    slot: Slot


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, forbid_unknown_fields=True):
    """Both directions: this end has closed; no further message follows."""


class Failed(msgspec.Struct, tag="failed", array_like=True, forbid_unknown_fields=True):
    """Both directions: this end failed."""

    reason: str


class Lost(msgspec.Struct, tag="lost", array_like=True, forbid_unknown_fields=True):
    """From a relay: the end beyond it, `peer`, ended without a goodbye; without a `peer`, the end in the relay's process."""

    peer: str
    why: str


@dataclass(frozen=True)
class Disconnected:
    """Received instead of a message: the peer ended without a goodbye."""

    why: str


ControlMessage: TypeAlias = Welcome | KeyValue | Full | More | Portion | Staged | Posted | Arrived | Free | Goodbye | Failed | Lost
DIED = Disconnected("died: its connection ended without a goodbye")
_decoder = msgspec.msgpack.Decoder(ControlMessage)


def bytes_that_fit(size: int | float, slots: int, least: int) -> int | None:
    """The size of parts, at least this many bytes, with which the messages of all slots fit into a socket's buffer; None if under two."""
    most = MAX_SLOTS // slots - 3  # the others: `Full`, the last part, and one for another device
    return max(least, math.ceil(size / most)) if most > 1 else None


def part_bytes(size: int | float, slots: int, least: int) -> int | None:
    """The size of the parts in which a message is sent between hosts; None if it has hardly two parts, and is sent whole.

    >>> part_bytes(1 << 20, 1, 4 << 20), part_bytes(100 << 20, 1, 4 << 20), part_bytes(1 << 30, 2, 4 << 20)
    (None, 4194304, 37025581)
    """
    return bytes_that_fit(size, slots, least) if size >= 2 * least else None


def encode(message: ControlMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def send(connection: Connection, message: ControlMessage, *handles: int | None) -> None:
    """Send a message, then file descriptors. If the peer has ended, the next `receive` reports it."""
    try:
        connection.send(encode(message))
        for handle in handles:
            if handle is not None:
                connection.send_handle(handle)
    except OSError:
        connection.end()  # part of a message may have been sent, so nothing may follow it


def tell(readers: Iterable[Connection], message: ControlMessage, handle: int | None = None) -> None:
    """Send a message to all of these readers."""
    for reader in readers:
        send(reader, message, handle)


def tell_full(readers: Iterable[Connection], full: Full, handle: int | None, memory: Handle | Segment | None) -> None:
    """Announce a message to readers; only readers on this host receive `memory`, of its carried bytes. Closes its handle."""
    for reader in readers:
        if memory is None or reader.host:
            send(reader, full, handle)
        elif isinstance(memory, Handle):
            send(reader, msgspec.structs.replace(full, memory=memory), handle)
        else:
            send(reader, msgspec.structs.replace(full, memory=memory.size), handle, memory.handle)
    if isinstance(memory, Segment):
        os.close(memory.handle)


def tell_part(readers: Iterable[Connection], part: Portion, *, more: bool) -> None:
    """Announce a part to relays to other hosts, and to readers on this host if it completes `more` tensors."""
    for reader in readers:
        if reader.sends_on:
            send(reader, part)
        elif more:
            send(reader, More(part.slot, part.tensors))


def receive(connection: Connection) -> ControlMessage | Disconnected:
    """Receive the next message, or `Disconnected` with the reason."""
    try:
        return _decoder.decode(connection.receive())
    except UNREADABLE as error:
        return Disconnected(f"sent an unreadable control message ({error}); the channel is of no further use")
    except (EOFError, OSError) as error:
        return disconnect_message(error)


def disconnect_message(error: Exception) -> Disconnected:
    """Name the reason why a peer is lost."""
    if isinstance(error, EOFError | ConnectionError):
        return DIED
    if isinstance(error, BlockingIOError):
        return Disconnected("stopped in the middle of a control message")
    return Disconnected(f"broke the protocol of this job ({error}); the channel is of no further use")


def connect(channel: str, address: str, authkey: bytes, timeout_s: float, *, encrypt: bool = False) -> tuple[Connection, Welcome]:
    """Connect to the writer that listens at `address`, and receive its welcome; waits for the writer to start.

    Raises ChannelTimeout if there is none after `timeout_s`, ChannelBroken if it has ended, ChannelError if it refuses the key.
    """
    where = f"channel '{channel}', a reader"
    sock = dial(where, address, timeout_s)
    try:
        connection = Connection(sock, authkey, timeout_s, server=False, encrypt=encrypt)
        try:
            with connection.deadline(timeout_s):
                welcome = _decoder.decode(connection.receive())
            if not isinstance(welcome, Welcome):
                raise ChannelError(f"{where}: the writer at '{address}' sent {show_value(welcome)} where its welcome belongs")
            return connection, welcome
        except BaseException:
            connection.close()
            raise
    except BlockingIOError as error:
        raise ChannelTimeout(f"{where}: waited {timeout_s:g} s, the writer at '{address}' does not answer") from error
    except AuthenticationError as error:
        raise ChannelError(f"{where}: the writer at '{address}' refused the authkey; all ends of a job use one key ({error})") from error
    except (OSError, EOFError) as error:  # its death, or a failure of its host, is the cause, as at any later time
        raise writer_gone_error(where, address, error, channel) from error
    except UNREADABLE as error:
        raise ChannelError(f"{where}: the writer at '{address}' sent no welcome ({error})") from error


def stop(message: ControlMessage | Disconnected, role: str, connection: Connection) -> Stop:
    """The reason why the peer sends nothing more: its last message, or what was received instead."""
    who = f"{role} ({connection.peer})"
    match message:
        case Goodbye():
            return Stop(who, None, connection.pid)
        case Failed():
            return Stop(who, f"failed: {message.reason}", connection.pid)
        case Disconnected():
            return Stop(who, message.why, connection.pid, connection.host)
        case Lost():
            return Stop(f"{role} ({message.peer or connection.peer})", message.why)
        case _:
            return Stop(who, f"sent {show_value(message)} where no such message belongs; the channel is of no further use", connection.pid)
