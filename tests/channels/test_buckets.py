"""Messages that are read while they are being written, bucket by bucket."""

import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rlgraph.channels.api import MAX_SLOTS
from rlgraph.channels.host import slot_memory
from rlgraph.channels.host.protocol import More
from rlgraph.channels.local import local_channel
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout

LONG, SHORT = 120.0, 0.02
COLUMNS = {"a": torch.arange(3.0), "b": torch.arange(4.0), "c": torch.arange(0.0), "d": torch.arange(5.0)}
WHOLE = {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(3)}
A_TENSOR = 8  # bytes: each tensor but the empty one fills a bucket


class Gate:
    """Lets one bucket after another be copied; told to, the copy of a bucket fails."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.broken = False

    def copy(self, bucket: slot_memory.Bucket, columns: object) -> None:
        assert self.open.acquire(timeout=LONG)
        if self.broken:
            raise RuntimeError("no memory")
        return COPY(bucket, columns)  # type: ignore[arg-type]


COPY = slot_memory.Bucket.copy


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(slot_memory.Bucket, "copy", lambda bucket, columns: gate.copy(bucket, columns))
    return gate


@pytest.fixture
def beside() -> Iterator[Callable[..., threading.Thread]]:
    """Return a function that calls another in a thread of its own."""
    threads = []

    def start(work: Callable[[], object]) -> threading.Thread:
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_reader_that_begins_sees_each_bucket_as_soon_as_it_is_there(make_shm, gate, beside):
    writer, [reader] = make_shm()
    thread = beside(lambda: writer.put(0, COLUMNS, LONG, bucket_bytes=A_TENSOR))
    columns = reader.begin(0, LONG)
    with pytest.raises(ChannelTimeout):
        reader.wait_for_tensors(0, SHORT)
    there = 0
    for expected in (1, 2, 4):  # an empty tensor comes with the next
        gate.open.release()
        there = reader.wait_for_tensors(there, LONG)
        assert there == expected
        for name in list(COLUMNS)[:there]:
            assert torch.equal(columns[name], COLUMNS[name])
    assert reader.wait_for_tensors(there, LONG) == len(COLUMNS)
    thread.join(LONG)
    reader.release()


def test_a_reader_that_takes_gets_the_message_when_all_of_it_is_there(make_shm, gate, beside):
    writer, [early, late] = make_shm(readers=2)
    beside(lambda: writer.put(0, COLUMNS, LONG, bucket_bytes=A_TENSOR))
    early.begin(0, LONG)
    gate.open.release()
    assert early.wait_for_tensors(0, LONG) == 1
    with pytest.raises(ChannelTimeout):
        late.take(0, SHORT)
    gate.open.release(2)
    got = late.take(0, LONG)
    assert all(torch.equal(got[name], column) for name, column in COLUMNS.items())


def test_a_message_that_is_being_written_is_not_released(make_shm, gate, beside):
    writer, [reader] = make_shm()
    beside(lambda: writer.put(0, COLUMNS, LONG, bucket_bytes=A_TENSOR))
    reader.begin(0, LONG)
    with pytest.raises(ChannelError, match="still being written"):
        reader.release()
    gate.open.release(3)


def test_a_writer_that_fails_between_buckets_breaks_the_channel(make_shm, gate, beside):
    writer, readers = make_shm(readers=2)

    def put() -> None:
        with pytest.raises(RuntimeError):
            writer.put(0, COLUMNS, LONG, bucket_bytes=A_TENSOR)
        writer.fail("no memory")

    beside(put)
    readers[0].begin(0, LONG)
    gate.open.release()
    assert readers[0].wait_for_tensors(0, LONG) == 1
    gate.broken = True
    gate.open.release()
    with pytest.raises(ChannelBroken, match="no memory"):
        readers[0].wait_for_tensors(1, LONG)
    with pytest.raises(ChannelBroken, match="no memory"):
        readers[1].take(0, LONG)


def test_a_writer_that_ends_between_buckets_breaks_the_channel(make_shm, gate, beside):
    writer, [reader] = make_shm()

    def put() -> None:
        with pytest.raises(RuntimeError):
            writer.put(0, COLUMNS, LONG, bucket_bytes=A_TENSOR)
        writer.close()

    gate.broken = True
    gate.open.release()
    beside(put)
    with pytest.raises(ChannelClosed):
        reader.take(0, LONG)


@pytest.mark.parametrize("tensors", [0, 1, 5])
def test_a_writer_that_announces_impossible_tensors_is_cut_off(make_shm, gate, beside, tensors):
    writer, [reader] = make_shm()
    beside(lambda: writer.put(0, COLUMNS, LONG, bucket_bytes=A_TENSOR))
    reader.begin(0, LONG)
    gate.open.release()
    assert reader.wait_for_tensors(0, LONG) == 1
    writer._tell(More(1, tensors))
    with pytest.raises(ChannelBroken, match="where no such message belongs"):
        reader.wait_for_tensors(1, LONG)
    gate.open.release(2)


@pytest.mark.parametrize("slots", [1, 3, 21, 22, MAX_SLOTS])
def test_no_number_of_buckets_fills_the_socket_of_a_reader_that_does_not_listen(make_shm, slots):
    writer, [reader] = make_shm(slots=slots)
    columns = {str(number): torch.full((2,), number) for number in range(500)}
    for step in range(slots):
        writer.put(step, columns, LONG, bucket_bytes=1)
    assert len(writer._write_views[0]._buckets[1]) * slots <= MAX_SLOTS
    for step in range(slots):
        assert reader.take(step, LONG)["499"].tolist() == [499, 499]


def test_buckets_make_no_difference_between_hosts_and_within_a_process(make):
    writer, [reader] = make()
    writer.put(0, COLUMNS, LONG, bucket_bytes=1)
    columns = reader.begin(0, LONG)
    there = 0
    while there < len(COLUMNS):
        there = reader.wait_for_tensors(there, LONG)
    assert all(torch.equal(columns[name], column) for name, column in COLUMNS.items())
    reader.release()


def rows_of(version: int, rank: int) -> list[WeightShard]:
    """Return a rank's rows: 0 to 3 of each of some parameters, of which rank 0 holds the first."""
    draw, shards = torch.Generator().manual_seed(100 * version + rank), []
    for number in range(9):
        counts = [number % 4, (number + 1) % 4]
        rows = torch.randn(counts[rank], 3, generator=draw)
        shards.append(WeightShard(f"p{number}", (sum(counts), 3), (counts[0] * rank, 0), rows))
    return shards


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 30])
def test_weights_that_arrive_in_buckets_are_those_that_were_published(make_shm, buffers, checksum, bucket_bytes):
    ends = [make_shm(slots=1) for _ in range(2)]
    writers = [WeightsWriter(writer, torch.bfloat16, bucket_bytes, checksum) for writer, _ in ends]
    reader = WeightsReader([readers[0] for _, readers in ends], buffers)
    for version in range(1, 5):
        parts = [rows_of(version, rank) for rank in range(2)]
        for writer, part in zip(writers, parts, strict=True):
            writer.publish(version, part, LONG)
        received = reader.receive(version, LONG)
        assert list(received) == [shard.name for shard in parts[0]]
        for name, *rows in zip(received, *parts, strict=True):
            assert torch.equal(received[name], torch.cat([row.tensor for row in rows]).bfloat16()), name
        reader.release()


@pytest.mark.parametrize(("buffers", "name", "box"), [(1, "p5", "[1:3, 0:3]"), (2, "p0", "[0:1, 0:3]")], ids=["part", "whole"])
def test_a_checksum_names_the_parameter_that_arrived_with_other_bits(make_shm, buffers, name, box):
    ends = [make_shm() for _ in range(2)]
    writers = [WeightsWriter(writer, torch.bfloat16, 1 << 20, checksum=True) for writer, _ in ends]
    reader = WeightsReader([readers[0] for _, readers in ends], buffers)
    writers[0].publish(1, rows_of(1, 0), LONG)
    sound = writers[1].writer.put

    def damaged(step, columns, *rest, **options):
        row = columns[name].clone()
        row[-1, [0, 2]] = row[-1, [2, 0]]  # two numbers change places
        sound(step, columns | {name: row}, *rest, **options)

    writers[1].writer.put = damaged
    writers[1].publish(1, rows_of(1, 1), LONG)
    with pytest.raises(
        ChannelBroken, match=re.escape(f"version 1 of the weights: parameter '{name}' {box} of trainer rank 1 changed on the way")
    ):
        reader.receive(1, LONG)


def test_checksums_within_a_process():
    writer, readers = local_channel("weights", slots=1, readers=1)
    WeightsWriter(writer, torch.bfloat16, checksum=True).publish(1, unsharded_weights(WHOLE), 1.0)
    reader = WeightsReader(readers, buffers=1)
    assert list(reader.receive(1, 0.0)) == list(WHOLE)
