"""The control path of host channels: small tokens over an authenticated socket, where death is an end-of-file."""

from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Annotated, Literal, TypeAlias

import msgspec

from rlgraph.channels.api import MAX_SLOTS, Stop
from rlgraph.channels.host.address import dial
from rlgraph.channels.host.connection import UNREADABLE, Link
from rlgraph.errors import ChannelError, ChannelTimeout, shown

MAX_REASON = 4000  # characters: the token that carries it still fits into one write
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Kind: TypeAlias = Literal["nccl", "gloo"]  # of what carries columns on a GPU between hosts
Slot: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]


class Welcome(msgspec.Struct, tag="welcome", array_like=True, forbid_unknown_fields=True):
    """Writer to reader, first of all: the slots of the channel, and what carries its columns on a GPU where TCP does not."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    carrier: Kind | None = None


class Told(msgspec.Struct, tag="told", array_like=True, forbid_unknown_fields=True):
    """Either way, before the first message: what one end of a carrier tells the other, so that they find each other."""

    key: str
    value: bytes


class Full(msgspec.Struct, tag="full", array_like=True, forbid_unknown_fields=True):
    """Writer to reader: a slot holds a message. Where `segment` is not 0, a handle of that slot's new memory follows.

    `carried` bytes of it go another way than the rest, once the reader's host asks for them. `coming` tensors of it are still being
    written, one after the other: `More` says how far.
    """

    step: int
    slot: Slot
    header: Size
    size: Size
    segment: Size
    carried: Size = 0
    coming: Size = 0


class More(msgspec.Struct, tag="more", array_like=True, forbid_unknown_fields=True):
    """Writer to reader: the first so many tensors of the slot's message are there now."""

    slot: Slot
    tensors: Size


class Posted(msgspec.Struct, tag="posted", array_like=True, forbid_unknown_fields=True):
    """The reader's relay to the writer's: memory waits for the bytes of the slot that are carried apart."""

    slot: Slot


class Arrived(msgspec.Struct, tag="arrived", array_like=True, forbid_unknown_fields=True):
    """The reader's relay to the writer's: those bytes are there, and the writer's end may go."""

    slot: Slot


class Free(msgspec.Struct, tag="free", array_like=True, forbid_unknown_fields=True):
    """Reader to writer: this reader is done with the slot."""

    slot: Slot


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, forbid_unknown_fields=True):
    """Either way: no further token comes."""


class Failed(msgspec.Struct, tag="failed", array_like=True, forbid_unknown_fields=True):
    """Either way: this end failed."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """Instead of a token: the peer will send no more, and said no goodbye."""

    why: str


Token: TypeAlias = Welcome | Told | Full | More | Posted | Arrived | Free | Goodbye | Failed
DIED = Lost("died: its connection ended without a goodbye")
_decoder = msgspec.msgpack.Decoder(Token)


def encode(token: Token) -> bytes:
    return msgspec.msgpack.encode(token)


def send(link: Link, token: Token, handle: int | None = None) -> None:
    """Send a token, and a file descriptor after it. A peer that is gone is no error here: the next `receive` finds why."""
    try:
        link.send(encode(token))
        if handle is not None:
            link.send_handle(handle)
    except OSError:
        link.end()  # half a token may be on its way, so nothing further can be


def receive(link: Link) -> Token | Lost:
    """Return the next token, or why there is none."""
    try:
        return _decoder.decode(link.receive())
    except UNREADABLE as error:
        return Lost(f"sent what is no token ({error}); the channel is of no further use")
    except (EOFError, OSError) as error:
        return lost(error)


def lost(error: Exception) -> Lost:
    """Say why a peer is lost."""
    if isinstance(error, EOFError | ConnectionError):
        return DIED
    if isinstance(error, BlockingIOError):
        return Lost("stopped in the middle of a token")
    return Lost(f"sent what no end of this job sends ({error}); the channel is of no further use")


def connect(channel: str, address: str, authkey: bytes, timeout_s: float) -> tuple[Link, Welcome]:
    """Return a link to the writer that listens there, and its welcome; waits for the writer to be there.

    Raises ChannelTimeout when there is none after `timeout_s`, ChannelError when it refuses the key.
    """
    where = f"channel '{channel}', a reader"
    sock = dial(where, address, timeout_s)
    try:
        link = Link(sock, authkey, timeout_s, server=False)
        try:
            with link.deadline(timeout_s):
                welcome = _decoder.decode(link.receive())
            if not isinstance(welcome, Welcome):
                raise ChannelError(f"{where}: the writer at '{address}' sent {shown(welcome)} where its welcome belongs")
            return link, welcome
        except BaseException:
            link.close()
            raise
    except BlockingIOError as error:
        raise ChannelTimeout(f"{where}: waited {timeout_s:g} s, the writer at '{address}' does not answer") from error
    except AuthenticationError as error:
        raise ChannelError(f"{where}: the writer at '{address}' refused the authkey; all ends of a job use one key") from error
    except (OSError, EOFError, *UNREADABLE) as error:
        raise ChannelError(f"{where}: the writer at '{address}' is gone ({error or 'end of file'})") from error


def stop(token: Token | Lost, who: str, link: Link) -> Stop:
    """Why the peer sends no more, from its last token or what came instead of one."""
    who = f"{who} ({link.peer})"
    match token:
        case Goodbye():
            return Stop(who, None, link.pid)
        case Failed():
            return Stop(who, f"failed: {token.reason}", link.pid)
        case Lost():
            return Stop(who, token.why, link.pid)
        case _:
            return Stop(who, f"sent {shown(token)} where no such token belongs; the channel is of no further use", link.pid)
