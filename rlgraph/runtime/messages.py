"""The messages between driver, workers and warm processes, besides the payload: small typed messages over an authenticated socket."""

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from rlgraph.channels.host.connection import UNREADABLE, Connection, ProtocolError
from rlgraph.engines.hf.export import ExportLayout, ShardBox
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Node
from rlgraph.plan.plan import ChannelEnd
from rlgraph.plan.schedule import Sampled, Span


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A worker has connected."""

    worker: str
    pid: int


class Opened(msgspec.Struct, tag=True, frozen=True):
    """A worker listens at the ends at which it writes: the actual address of each end, by its planned one.

    `apart` is True if its host does not see the folder of checkpoints.
    """

    worker: str
    addresses: dict[str, str]
    apart: bool = False


class Join(msgspec.Struct, tag=True, frozen=True):
    """Every worker listens at these addresses: connect, and load the engine."""

    addresses: dict[str, str]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A worker has loaded its engine and joined its channels."""

    worker: str


class Slots(msgspec.Struct, frozen=True):
    """The slots of a channel that one end holds now, and the most that it held so far."""

    end: ChannelEnd
    used: int
    peak: int


class Report(msgspec.Struct, tag=True, frozen=True):
    """A worker has fired all its nodes for a step."""

    worker: str
    step: int
    metrics: dict[str, float]
    spans: list[Span]
    slots: list[Slots]
    sampled: list[Sampled]
    published_bytes: int  # of one version, of this worker's shards
    notices: list[str] = []  # settings that work differently than asked, each reported once


class Cells(msgspec.Struct, frozen=True):
    """Rows of a column: the dtype and shape of an array with its bytes, or texts."""

    dtype: str
    shape: list[int]
    data: bytes = b""
    text: list[str] = []


class SampledRows(msgspec.Struct, tag=True, frozen=True):
    """Rows that a node wrote at a step, for the recorder of samples. A node with a row for each prompt numbers prompts."""

    node: str
    rollout: str
    step: int
    rows: list[int]
    columns: dict[str, Cells]


class SampleSource(msgspec.Struct, frozen=True):
    """Columns of a node that belong to the `rows` responses of a rollout. Each row of the node belongs to `repeat` of them.

    `kind`: whether these are trained on or are answers of an evaluation.
    """

    node: str
    rollout: str
    rows: int
    repeat: int
    columns: tuple[str, ...]
    kind: Literal["training", "evaluation"] = "training"


class SampleRequest(msgspec.Struct, tag=True, frozen=True):
    """The rows that the workers send to the recorder: a share of each step, drawn by the seed, at most `most`."""

    share: float
    most: int | None
    seed: int
    sources: list[SampleSource]


class ProfileRequest(msgspec.Struct, tag=True, frozen=True):
    """The workers that write profiles, of which steps, and the folder of the profiles."""

    first: int
    last: int
    workers: list[str]
    folder: str
    memory: bool = True
    stacks: bool = False
    shapes: bool = False


class Failure(msgspec.Struct, tag=True, frozen=True):
    """A node raised an error, or a channel gave up."""

    worker: str
    step: int
    node: str
    error: str  # class name
    message: str
    traceback: str
    channel: str = ""  # that gave up because of its peer
    peer: int = 0  # the process at its other end, if known
    host: str = ""  # the address of the other end's host, if the connection to another host ended


class Written(msgspec.Struct, frozen=True):
    """A file of a checkpoint, by its path in the checkpoint's folder."""

    path: str
    bytes: int
    sha256: str


class CheckpointShard(msgspec.Struct, frozen=True):
    """The files that one worker puts into a checkpoint: `file` holds its nodes, the others the model it trains."""

    worker: str
    nodes: tuple[str, ...]
    rank: int
    world: int
    file: str
    written: tuple[Written, ...]


class Saved(msgspec.Struct, tag=True, frozen=True):
    """A worker's shard of the checkpoint after `step` steps is on the disk."""

    step: int
    shard: CheckpointShard


class NotSaved(msgspec.Struct, tag=True, frozen=True):
    """A worker could not write its shard of a checkpoint."""

    step: int
    worker: str
    message: str
    where: str = ""  # the host, which the driver knows, as " on host 1 (ADDRESS)"


class Go(msgspec.Struct, tag=True, frozen=True):
    """Fire `step`. This is the only tick: a worker waits for it without polling."""

    step: int


class Save(msgspec.Struct, tag=True, frozen=True):
    """Complete the checkpoint after `step` steps; no further tick comes before that is done."""

    step: int


class DescribeShards(msgspec.Struct, tag=True, frozen=True):
    """Describe the shards of the model that this worker trains; no step is at work."""


class ShardsDescribed(msgspec.Struct, tag=True, frozen=True):
    """The shards that a worker holds of its model, after `step` steps."""

    worker: str
    step: int
    boxes: list[ShardBox]


class WriteShards(msgspec.Struct, tag=True, frozen=True):
    """Write the shards of the model into the files of an export, which exist already."""

    folder: str
    layout: ExportLayout


class ShardsWritten(msgspec.Struct, tag=True, frozen=True):
    """A worker has written its shards; or the disk `refused` them, with the number of the system's error."""

    worker: str
    refused: str = ""
    number: int = 0


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Close everything and end. With `keep` the process keeps its engine and stays for the next job."""

    keep: bool = False


MOST_BYTES = 1 << 26  # of a message; a report of many spans has some thousand

FromDriver: TypeAlias = Join | Go | Save | DescribeShards | WriteShards | SampleRequest | ProfileRequest | Shutdown
FromWorker: TypeAlias = Hello | Opened | Ready | Report | SampledRows | Failure | Saved | NotSaved | ShardsDescribed | ShardsWritten
Message: TypeAlias = FromDriver | FromWorker

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(connection: Connection, message: Message) -> None:
    """Send one message. Raises OSError if the other end is gone."""
    connection.send(_encoder.encode(message))


def receive(connection: Connection) -> Message:
    """Wait for the next message. Raises EOFError if the other end is gone, OSError if it sends nonsense."""
    connection.wait()  # no deadline while the peer lives: a silent peer is not broken
    try:
        return _decoder.decode(connection.receive(MOST_BYTES))
    except UNREADABLE as error:
        raise ProtocolError(f"bytes that are not a message ({error})") from error


# How a program asks its warm processes for workers: an order, with the files that travel with it over a socket.

PID_BYTES = 8
MOST_FILES = 5  # of an order: the worker's output, its errors, its start values, the file for its id, and the socket for later orders


class ForkOrder(msgspec.Struct, frozen=True):
    """The start values of a worker; with `keeps` it keeps its engine for later orders. `spec` is pickled; it needs the import `path`."""

    folder: str
    path: tuple[str, ...]
    spec: bytes
    driver: str
    keeps: bool = False


def send_order(to: socket.socket, order: ForkOrder, further: Sequence[int] = ()) -> None:
    """Send an order and the `further` files; the worker writes to this program's output. Raises OSError if nobody receives it."""
    with tempfile.TemporaryFile() as given:
        given.write(msgspec.msgpack.encode(order))
        given.flush()
        given.seek(0)
        sys.stdout.flush()
        socket.send_fds(to, [b"1"], [1, 2, given.fileno(), *further])


def receive_order(of: socket.socket) -> list[int]:
    """Wait for an order and return its files; empty once the driver has closed its end."""
    message, files, _, _ = socket.recv_fds(of, 1, MOST_FILES)
    return files if message else []


def take_over(files: Sequence[int]) -> ForkOrder:
    """Read the order that came with these files, and write to its output and errors from now on."""
    output, errors, given = files[:3]
    os.dup2(output, 1)
    os.dup2(errors, 2)
    with open(given, "rb") as file:
        order = msgspec.msgpack.decode(file.read(), type=ForkOrder)
    for fd in (output, errors):
        os.close(fd)
    return order


# Find which node writes which columns of a rollout's responses, so that their rows can be recorded where they are written.

Kind: TypeAlias = Literal["training", "evaluation"]


def sample_sources(graph: Graph) -> list[SampleSource]:
    """List the nodes whose columns belong to the responses of a rollout, or to the answers of an evaluation, upstream first."""
    rollouts = [node for node in graph.nodes if node.traits.work == "generate" and "response_mask" in node.writes]
    found = []
    for node in graph.nodes:
        for rollout in (rollout for rollout in rollouts if node.writes and (rollout.due is None) == (node.due is None)):
            if rollout in _rollouts(node, rollouts) and rollout.rows % node.rows == 0:
                kind: Kind = "training" if rollout.due is None else "evaluation"
                found.append(SampleSource(node.name, rollout.name, rollout.rows, rollout.rows // node.rows, node.writes, kind))
    return found


def _rollouts(node: Node, rollouts: list[Node]) -> list[Node]:
    """The rollouts to whose responses a node's rows belong: the rollouts that it reads, or all rollouts that a source of prompts feeds."""
    if node in rollouts:
        return [node]
    above = [rollout for rollout in rollouts if node.needs(rollout)]
    if not above:
        return [r for r in rollouts if not r.traits.reorders and any(output.node is node for output in r.inputs)]
    read = [node.source_of(column) for column in ("responses", "response_mask") if column in node.reads]
    own = [rollout for rollout in above if rollout in read]
    return own or (above if len(above) == 1 else [])
