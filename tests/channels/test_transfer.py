"""What channels do whose columns are carried apart, between hosts and by a library: here by gloo, as on GPUs by NCCL."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support import forked_workers

from rlgraph.channels import HostReader, HostWriter
from rlgraph.channels.remote import relay
from rlgraph.channels.remote.transfer import Finish, Gloo
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.errors import ChannelBroken, ChannelError, ChannelTimeout

LONG, START_S = 120.0, 180.0
HERE = "127.0.0.1:0"
LARGE = torch.arange(4 << 20, dtype=torch.int64)  # 32 MiB, more than the sockets hold


def be_reader(address: str, signal_number: int) -> None:
    """Be a reader that asks for the bytes and gets the signal instead of them."""

    def receive(self: Gloo, memory: torch.Tensor) -> Finish:
        return lambda: os.kill(os.getpid(), signal_number)

    Gloo.receive = receive  # type: ignore[method-assign]
    reader = HostReader("edge", b"key", address, 60)
    signal.pause()
    reader.close()


def be_writer(pipe: Connection, signal_number: int) -> None:
    """Be a writer that gets the signal when its reader waits for the bytes."""

    def send(self: Gloo, memory: torch.Tensor) -> Finish:
        os.kill(os.getpid(), signal_number)
        raise AssertionError

    Gloo.send = send  # type: ignore[method-assign]
    writer = HostWriter("edge", 1, 1, b"key", "127.0.0.1:0", "gloo")
    pipe.send(writer.address)
    writer.put(0, {"x": LARGE}, 60)
    signal.pause()


@pytest.fixture
def carried(make_shm: Any) -> Callable[..., tuple[HostWriter, list[HostReader]]]:
    return lambda slots=2, readers=1: make_shm(slots, readers, HERE, "gloo")


@pytest.fixture
def process() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a process, which is gone after the test."""
    started = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        started.append(forked_workers.server.Process(target=target, args=arguments, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.join()


def test_messages_of_changing_sizes_cross_with_and_without_text(carried: Any) -> None:
    writer, [reader] = carried(slots=2)
    sent = [
        {"x": torch.arange(10), "who": ["écrivain"]},
        {"x": LARGE, "empty": torch.ones(0, 3), "y": torch.ones(3, dtype=torch.bool)},
        {"who": ["only", "text"]},
        {},
        {"empty": torch.ones(2, 0)},
        {"y": torch.full((), 2.5)},
    ]
    for step, columns in enumerate(sent):
        writer.put(step, columns, LONG)
        got = reader.take(step, LONG)
        assert list(got) == list(columns)
        for name, column in columns.items():
            assert torch.equal(got[name], column) if isinstance(column, torch.Tensor) else got[name] == column
        del got
        reader.release()


@pytest.mark.parametrize("beside", [{}, {"x": torch.arange(5)}, {"who": ["text"]}], ids=["alone", "beside another", "beside text"])
def test_an_empty_column_arrives_in_device_memory(carried: Any, beside: dict[str, Any]) -> None:
    writer, [reader] = carried()
    for step, shape in enumerate([(0,), (2, 0), (0, 3)]):
        writer.put(step, {**beside, "empty": torch.ones(shape)}, LONG)
        empty = reader.take(step, LONG)["empty"]
        assert empty.shape == shape
        assert empty.untyped_storage().data_ptr() in {memory.data_ptr() for memory in reader._carried.values()}
        del empty
        reader.release()


def test_a_message_too_long_for_the_buffers_of_tcp_does_not_lock_out_the_one_before_it(carried: Any) -> None:
    writer, [reader] = carried(slots=2)
    text = ["long " * 5_000_000]
    for step in range(2):
        writer.put(step, {"x": LARGE + step, "text": text}, LONG)
    for step in range(2):
        got = reader.take(step, LONG)
        assert torch.equal(got["x"], LARGE + step)
        assert got["text"] == text
        reader.release()


def test_columns_with_a_carrier_do_not_go_over_tcp(carried: Any) -> None:
    writer, [reader] = carried()
    writer.put(0, {"x": LARGE}, LONG)
    assert torch.equal(reader.take(0, LONG)["x"], LARGE)
    assert all(len(segment) < 10_000 for segment in reader._segments.values())


def test_a_slot_is_not_written_over_while_a_slow_reader_holds_it(carried: Any) -> None:
    writer, [fast, slow] = carried(slots=2, readers=2)
    for step in range(2):
        writer.put(step, {"x": torch.full((1000,), step)}, LONG)
    held = [slow.take(step, LONG)["x"] for step in range(2)]
    for step in range(2):
        fast.take(step, LONG)
        fast.release()
    with pytest.raises(ChannelTimeout, match="all 2 slots are taken"):
        writer.put(2, {"x": torch.full((1000,), 2)}, 0.1)
    assert [view.unique().tolist() for view in held] == [[0], [1]]


def test_channels_transfer_in_both_directions_at_once(carried: Any) -> None:
    ends = [carried(slots=2, readers=2) for _ in range(3)]
    seen: list[bool] = []

    def read(reader: HostReader) -> None:
        for step in range(4):
            seen.append(torch.equal(reader.take(step, LONG)["x"], LARGE[step:]))
            reader.release()

    threads = [threading.Thread(target=read, args=(reader,)) for _, readers in ends for reader in readers]
    for thread in threads:
        thread.start()
    for step in range(4):
        for writer, _ in ends:
            writer.put(step, {"x": LARGE[step:]}, LONG)
    for thread in threads:
        thread.join(LONG)
    assert seen == [True] * 24


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_version_of_weights_arrives_bit_for_bit(carried: Any, buffers: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = {"embed": torch.randn(7, 5, generator=generator), "norm": torch.randn(2, generator=generator)}
    ends = [carried(slots=2) for _ in range(ranks)]
    writers = [WeightsWriter(writer, torch.bfloat16) for writer, _ in ends]
    reader = WeightsReader([readers[0] for _, readers in ends], buffers)
    for version in range(1, 5):
        for rank, writer in enumerate(writers):
            shards = []
            for name, tensor in whole.items():
                first = min(rank * -(-len(tensor) // ranks), len(tensor))  # as torch.chunk cuts; the last ranks may have nothing
                rows = (tensor * version)[first : first + -(-len(tensor) // ranks)]
                shards.append(WeightShard(name, tuple(tensor.shape), (first, *[0] * (tensor.dim() - 1)), rows))
            writer.publish(version, shards, LONG)
        got = reader.receive(version, LONG)
        assert all(torch.equal(got[name], (tensor * version).bfloat16()) for name, tensor in whole.items())
        del got
        reader.release()
    for writer in writers:
        writer.writer.close()


def test_a_reader_takes_the_messages_of_a_writer_that_closed_or_died(carried: Any) -> None:
    writer, [reader] = carried(slots=2)
    for step in range(2):
        writer.put(step, {"x": LARGE[step:]}, LONG)
    writer.close()
    for step in range(2):
        assert torch.equal(reader.take(step, LONG)["x"], LARGE[step:])
        reader.release()


def test_a_reader_killed_in_the_middle_of_a_transfer_breaks_the_channel_at_once(process: Any) -> None:
    writer = HostWriter("edge", 1, 1, b"key", HERE, "gloo")
    process(be_reader, writer.address, signal.SIGKILL)
    writer.put(0, {"x": LARGE}, START_S)
    since = time.monotonic()
    with pytest.raises(ChannelBroken, match=r"'edge', the writer, step 1: a reader \(at 127.0.0.1, port \d+\) died"):
        writer.put(1, {"x": LARGE}, LONG)
    assert time.monotonic() - since < LONG / 2
    writer.close()


@pytest.mark.parametrize("library", ["hears of it", "does not hear of it"])
def test_a_writer_killed_in_the_middle_of_a_transfer_breaks_the_channel_at_once(
    process: Any, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    go_on = threading.Event()
    if library == "does not hear of it":
        monkeypatch.setattr(Gloo, "receive", lambda self, memory: lambda: go_on.wait(LONG))
    here, there = forked_workers.server.Pipe()
    process(be_writer, there, signal.SIGKILL)
    reader = HostReader("edge", b"key", here.recv(), LONG)
    since = time.monotonic()
    with pytest.raises(ChannelBroken, match=r"'edge', a reader, step 0: the writer \(at 127.0.0.1, port \d+\) died"):
        reader.take(0, LONG)
    assert time.monotonic() - since < LONG / 2
    go_on.set()
    reader.close()


def test_a_writer_stopped_in_the_middle_of_a_transfer_is_a_timeout_of_its_reader(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "FAREWELL_S", 0.1)
    here, there = forked_workers.server.Pipe()
    process(be_writer, there, signal.SIGSTOP)
    threads = set(threading.enumerate())
    reader = HostReader("edge", b"key", here.recv(), LONG)
    with pytest.raises(ChannelTimeout, match=r"'edge', a reader, step 0: waited 0\.5 s, no message came"):
        reader.take(0, 0.5)
    reader.close()
    ended({thread for thread in set(threading.enumerate()) - threads if thread.name != "carrier"})


def test_a_reader_stopped_in_the_middle_of_a_transfer_is_a_timeout_of_its_writer(process: Any) -> None:
    writer = HostWriter("edge", 1, 1, b"key", HERE, "gloo")
    process(be_reader, writer.address, signal.SIGSTOP)
    writer.put(0, {"x": LARGE}, START_S)
    with pytest.raises(ChannelTimeout, match=r"'edge', the writer, step 1: waited 0\.5 s, all 1 slots are taken"):
        writer.put(1, {"x": LARGE}, 0.5)
    writer.close()


def ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        while thread.ident is None:  # it is about to begin
            time.sleep(0.001)
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)


def test_a_transfer_that_hangs_breaks_the_channel_at_both_ends(carried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, [reader] = carried(slots=1)
    writer.put(0, {"x": torch.ones(3)}, LONG)
    reader.take(0, LONG)
    reader.release()
    go_on = threading.Event()
    monkeypatch.setattr(relay, "STALL_S", 0.3)
    monkeypatch.setattr(Gloo, "send", lambda self, memory: lambda: go_on.wait(LONG))
    writer.put(1, {"x": torch.ones(3)}, LONG)
    with pytest.raises(
        ChannelBroken, match=r"'edge', a reader, step 1: the writer .* columns on a GPU failed: it did not end within 0\.3 s"
    ):
        reader.take(1, LONG)
    with pytest.raises(
        ChannelBroken, match=r"'edge', the writer, step 2: a reader .* columns on a GPU failed: it did not end within 0\.3 s"
    ):
        writer.put(2, {"x": torch.ones(3)}, LONG)
    go_on.set()


@pytest.mark.parametrize("method", ["memory", "receive", "send"])
def test_an_error_of_the_communicator_breaks_the_channel_with_its_message(
    carried: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fails(self: Gloo, argument: object) -> None:
        raise RuntimeError("out of memory")

    writer, [reader] = carried(slots=1)
    monkeypatch.setattr(Gloo, method, fails)
    writer.put(0, {"x": torch.ones(3)}, LONG)
    with pytest.raises(ChannelBroken, match=r"'edge', a reader, step 0: the writer .* columns on a GPU failed: out of memory"):
        reader.take(0, LONG)
    with pytest.raises(ChannelBroken, match=r"'edge', the writer, step 1: a reader .* columns on a GPU failed: out of memory"):
        writer.put(1, {}, LONG)


def put_both(writer: HostWriter) -> None:
    for step in range(2):
        writer.put(step, {}, LONG)


def test_a_communicator_that_one_end_cannot_make_breaks_the_channel(carried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Gloo.__init__

    def fails(self: Gloo, meeting: Any, rank: int, timeout_s: float) -> None:
        if rank:
            raise RuntimeError("no library")
        make(self, meeting, rank, timeout_s)

    monkeypatch.setattr(Gloo, "__init__", fails)
    writer, [reader] = carried(slots=1)
    with pytest.raises(ChannelBroken, match=r"'edge', a reader, step 0: .* columns on a GPU failed: no library"):
        reader.take(0, LONG)
    with pytest.raises(ChannelBroken, match=r"'edge', the writer, step [01]: .* columns on a GPU failed: no library"):
        put_both(writer)


def test_a_carrier_is_refused_at_a_path() -> None:
    with pytest.raises(ChannelError, match=r"'edge' listens at the path '/tmp/x' and has the carrier 'nccl'.* give an address host:port"):
        HostWriter("edge", 1, 1, b"key", "/tmp/x", "nccl")


def test_nccl_is_refused_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ChannelError, match="'edge': its carrier 'nccl' moves columns from GPU to GPU, but this process sees no GPU"):
        HostWriter("edge", 1, 1, b"key", HERE, "nccl")


def test_no_thread_and_no_handle_is_left_when_both_ends_have_closed(carried: Any) -> None:
    threads, handles = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    writer = HostWriter("edge", 2, 1, b"key", HERE, "gloo")
    reader = HostReader("edge", b"key", writer.address, LONG)
    writer.put(0, {"x": LARGE}, LONG)
    reader.take(0, LONG)
    reader.release()
    writer.close()
    reader.close()
    ended(set(threading.enumerate()) - threads)
    assert set(os.listdir("/proc/self/fd")) <= handles
