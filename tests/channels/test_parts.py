"""Large messages between hosts travel in parts, each while the next is copied."""

import socket
import threading

import pytest
import torch

from rlgraph.channels import HostReader, HostWriter
from rlgraph.channels.host import channel as host_channel
from rlgraph.channels.host import protocol
from rlgraph.channels.host.connection import Connection
from rlgraph.channels.host.protocol import Full, Portion, Welcome
from rlgraph.errors import ChannelBroken, ChannelTimeout

LONG, SHORT = 20.0, 0.05
HERE = "127.0.0.1:0"
PART = 1 << 16
LARGE = PART  # elements of a column: several parts, whatever its dtype


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Let parts be small, and tell which were sent."""
    sent = []
    tell = HostWriter._tell
    monkeypatch.setattr(host_channel, "PART_BYTES", PART)

    def noted(end, message, *handle, **more):
        sent.append(message)
        tell(end, message, *handle, **more)

    monkeypatch.setattr(HostWriter, "_tell", noted)
    return sent


def columns_of(step: int) -> dict:
    torch.manual_seed(step)
    return {
        "large": torch.randint(0, 1 << 60, (LARGE,)),
        "text": ["ä", "b" * (step + 1)],
        "turned": torch.randn(300, 200).T,
        "nothing": torch.empty(0, 3),
        "some": torch.arange(7),
        "odd": torch.randn(LARGE + 13).to(torch.bfloat16),
        "scalar": torch.tensor(step),
        "bits": torch.rand(3, LARGE) > 0.5,
        "last": torch.empty(4, 0),
    }


@pytest.mark.parametrize("encrypt", [False, pytest.param(True, marks=pytest.mark.openssl)])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_every_kind_of_column_arrives_whole_and_in_order(parts, dtype, encrypt):
    writer = HostWriter("edge", 2, 1, b"key", HERE, encrypt=encrypt)
    reader = HostReader("edge", b"key", writer.address, LONG, encrypt=encrypt)
    for step in range(4):
        expected = columns_of(step)
        writer.put(step, expected, LONG, dtype=dtype)
        got = reader.take(step, LONG)
        assert list(got) == list(expected)
        for name, column in expected.items():
            if isinstance(column, torch.Tensor):
                assert torch.equal(got[name], column.to(dtype) if dtype and column.is_floating_point() else column), name
            else:
                assert got[name] == column
        reader.release()
    of_one = [message for message in parts if isinstance(message, Portion)]
    assert len(of_one) > 4 * 5
    assert all(isinstance(message, Full | Portion) for message in parts)
    writer.close()
    reader.close()


def test_a_small_message_is_sent_whole(parts):
    writer = HostWriter("edge", 1, 1, b"key", HERE)
    reader = HostReader("edge", b"key", writer.address, LONG)
    writer.put(0, {"x": torch.ones(10)}, LONG)
    assert reader.take(0, LONG)["x"].tolist() == [1] * 10
    assert [type(message) for message in parts] == [Full]
    writer.close()
    reader.close()


def written_by_hand(frames) -> tuple[HostReader, threading.Thread]:
    """Connect a reader to a writer that sends these messages, some with bytes behind them."""
    listener = socket.create_server(("127.0.0.1", 0))

    def write() -> None:
        with listener:
            connection = Connection(listener.accept()[0], b"key", LONG, server=True)
            connection.send(protocol.encode(Welcome(2)))
            for message, data in frames:
                connection.send(protocol.encode(message))
                connection.send_bytes(memoryview(data))
            connection.wait()  # until the reader has gone
            connection.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return HostReader("edge", b"key", "{}:{}".format(*listener.getsockname()), LONG), thread


def message(columns: dict) -> tuple[int, bytes]:
    """Lay columns out as a writer does: the size of the header, and all bytes."""
    layout = host_channel.slot_memory.MessageLayout(columns, None)
    header = layout.header(None)
    size = host_channel.slot_memory.size_of(layout, header)
    handle, segment = host_channel.slot_memory.new_segment("edge", size)
    host_channel.os.close(handle)
    for _ in host_channel.slot_memory.WriteView(layout, header, segment, None).write(columns):
        pass
    return len(header), segment[:size]


def test_a_reader_that_begins_sees_the_columns_that_are_there_while_others_are_on_their_way():
    columns = {"first": torch.arange(1000), "second": torch.arange(5000, 7000), "third": torch.arange(10)}
    header, data = message(columns)
    at = data.index(columns["second"].numpy().tobytes()[8:80]) - 8  # where the second begins
    reader, thread = written_by_hand([(Full(0, 0, header, len(data), 0, 0, 3), b""), (Portion(0, at + 40, 1), data[: at + 40])])
    got = reader.begin(0, LONG)
    assert reader.wait_for_tensors(0, LONG) == 1
    assert torch.equal(got["first"], columns["first"])
    with pytest.raises(ChannelTimeout):
        reader.wait_for_tensors(1, SHORT)
    reader.close()
    thread.join(LONG)


FULL = Full(0, 0, 100, 1000, 0, 0, 2)
HOSTILE = {
    "a part of no message": [(Portion(0, 10, 1), b"")],
    "a part of another slot": [(FULL, b""), (Portion(1, 500, 1), b"")],
    "a first part without the header": [(FULL, b""), (Portion(0, 99, 0), b"")],
    "more bytes than the message has": [(FULL, b""), (Portion(0, 1001, 1), b"")],
    "more tensors than the message has": [(FULL, b""), (Portion(0, 1000, 3), b"")],
    "a part that goes back": [(FULL, b""), (Portion(0, 500, 1), bytes(500)), (Portion(0, 400, 1), b"")],
    "fewer tensors than before": [(FULL, b""), (Portion(0, 500, 1), bytes(500)), (Portion(0, 600, 0), b"")],
    "all tensors without all bytes": [(FULL, b""), (Portion(0, 999, 2), b"")],
    "a message within another": [(FULL, b""), (Portion(0, 500, 1), bytes(500)), (FULL, b"")],
    "a part beyond the last": [(FULL, b""), (Portion(0, 1000, 2), bytes(1000)), (Portion(0, 1000, 2), b"")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_parts_that_no_writer_sends_break_the_channel(case):
    reader, thread = written_by_hand(HOSTILE[case])
    with pytest.raises(ChannelBroken):
        all(reader.take(step, LONG) for step in range(2))
    reader.close()
    thread.join(LONG)
    assert not thread.is_alive()
