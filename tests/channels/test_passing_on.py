"""What a reader passes on arrives whole at the readers of its host and of the next ones; an end that is lost is named to all."""

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from support.relay_channels import make_relay_channel, make_routed_channel

from rlgraph.channels import Reader, Writer
from rlgraph.channels.api import transport_of
from rlgraph.channels.host import channel as host_channel
from rlgraph.channels.host import protocol
from rlgraph.channels.host.protocol import More, Portion
from rlgraph.channels.remote import inward, transfer
from rlgraph.channels.remote.transfer import Finish, Gloo
from rlgraph.errors import ChannelBroken, ChannelClosed
from rlgraph.plan.channels import SHAPES, crossings, route_messages

LONG = 20.0
PART = 1 << 16
READERS = 4  # the one that passes on, one on its host, one on the next host, one on the writer's


@pytest.fixture(params=["tcp", "gloo"])
def ends(request, tmp_path, monkeypatch) -> Iterator[tuple[Writer, list[Reader]]]:
    monkeypatch.setattr(host_channel, "PART_BYTES", PART)
    monkeypatch.setattr(transfer, "PART_BYTES", PART)
    monkeypatch.setattr(inward, "_receives", threading.Semaphore(100))  # the ends stand for processes, of which each receives by itself
    writer, readers = make_relay_channel(transport_of(request.param), str(tmp_path / "e"), 2, READERS)
    yield writer, readers
    for end in (writer, *readers):
        end.close()


def columns_of(step: int) -> dict:
    torch.manual_seed(step)
    return {
        "large": torch.randint(0, 1 << 60, (3 * PART + step,)),
        "text": ["ä", "b" * (step + 1)],
        "some": torch.arange(7),
        "odd": torch.randn(PART + 13).to(torch.bfloat16),
        "nothing": torch.empty(0, 3),
    }


def test_large_messages_arrive_whole_at_every_reader(ends):
    writer, readers = ends
    for step in range(5):
        expected = columns_of(step)
        writer.put(step, expected, LONG)
        for reader in readers:
            got = reader.take(step, LONG)
            assert list(got) == list(expected)
            assert all(torch.equal(got[n], c) if isinstance(c, torch.Tensor) else got[n] == c for n, c in expected.items())
            reader.release()


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_messages_arrive_whole_on_many_hosts_in_each_shape(shape, transport, tmp_path, monkeypatch):
    monkeypatch.setattr(host_channel, "PART_BYTES", PART)
    monkeypatch.setattr(transfer, "PART_BYTES", PART)
    monkeypatch.setattr(inward, "_receives", threading.Semaphore(100))  # the ends stand for processes, of which each receives by itself
    where = {"w": 0, **{f"r{number}": 1 + number // 2 for number in range(11)}}  # two on each of five hosts, one on a sixth
    route = route_messages(shape, "w", [one for one in where if one != "w"], where, turn=1, turns=2)
    assert crossings(route, where) == (1, {"chain": 1, "tree": 2, "star": 6}[shape])
    writer, readers = make_routed_channel(transport_of(transport), str(tmp_path / "e"), 2, "w", route, where)
    try:
        for step in range(4):
            expected = columns_of(step)
            writer.put(step, expected, LONG)
            for reader in readers.values():
                got = reader.take(step, LONG)
                assert all(torch.equal(got[n], c) if isinstance(c, torch.Tensor) else got[n] == c for n, c in expected.items())
                reader.release()
    finally:
        for end in (writer, *readers.values()):
            end.close()


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_readers_of_one_host_hear_of_whole_tensors_and_other_hosts_of_parts(ends, monkeypatch):
    writer, readers = ends
    told, send = [], protocol.send

    def noted(connection, message, *handles):
        told.append((connection.sends_on, type(message)))
        send(connection, message, *handles)

    monkeypatch.setattr(protocol, "send", noted)
    expected = columns_of(0)
    writer.put(0, expected, LONG)
    for reader in readers:
        reader.begin(0, LONG)
        assert reader.wait_for_tensors(3, LONG) == 4
        reader.release()
    to_hosts, on_hosts = told.count((True, Portion)), told.count((False, More))
    assert to_hosts > 2 * 24, "two other hosts, each a part of 64 KiB of 1.6 MiB"
    assert 0 < on_hosts <= 3 * 4, "three readers share memory with whoever tells them, and there are four tensors"
    assert (False, Portion) not in told


@pytest.fixture
def third_part(monkeypatch) -> list[Callable[[], None]]:
    """Return a list of what happens before the writer sends its third part, and then whenever another host sends one."""
    do: list[Callable[[], None]] = []
    sent: list[Gloo] = []
    send = Gloo.send

    def watched_send(self: Gloo, memory: torch.Tensor) -> Finish:
        sent.append(self)
        if self is not sent[0]:
            do[1]()
        elif sent.count(self) == 3:
            do[0]()
        return send(self, memory)

    monkeypatch.setattr(Gloo, "send", watched_send)
    return do


@pytest.mark.parametrize("ends", ["gloo"], indirect=True)
def test_what_a_carrier_brings_is_sent_on_while_later_parts_are_still_to_come(ends, third_part):
    writer, readers = ends
    on, seen = threading.Event(), []
    third_part += [lambda: seen.append(on.wait(LONG)), on.set]
    expected = columns_of(0)
    writer.put(0, expected, LONG)
    for reader in readers:
        got = reader.take(0, LONG)
        assert all(torch.equal(got[n], c) for n, c in expected.items() if isinstance(c, torch.Tensor))
        reader.release()
    assert seen == [True], "the next host was sent a part before the writer sent its third"


@pytest.mark.parametrize("ends", ["gloo"], indirect=True)
def test_a_transfer_that_fails_in_the_middle_of_a_message_is_told_to_every_reader(ends, third_part):
    writer, readers = ends

    def fail() -> None:
        raise RuntimeError("no route to host")

    third_part += [fail, lambda: None]
    writer.put(0, columns_of(0), LONG)
    for reader in readers[:3]:  # the fourth shares the writer's memory
        with pytest.raises(ChannelBroken, match=r"failed: the transfer of columns on a GPU failed: no route to host"):
            reader.take(0, LONG)

    def put_more() -> None:
        for step in range(1, 4):
            writer.put(step, {}, LONG)

    with pytest.raises(ChannelBroken, match="no route to host"):
        put_more()


def test_memory_of_a_host_is_mapped_by_its_readers_and_not_copied(ends):
    writer, [passing, beside, *_] = ends
    writer.put(0, columns_of(0), LONG)
    passing.take(0, LONG)
    mine = passing._segments[passing._taken[-1][0]]
    beside.take(0, LONG)
    its = beside._segments[beside._taken[-1][0]]
    mine[8:16] = b"rewritten"[:8]
    assert its[8:16] == b"rewritten"[:8]


def test_what_follows_a_lost_writer_is_told_to_every_reader(ends):
    writer, readers = ends
    writer.put(0, columns_of(0), LONG)
    for reader in readers:
        reader.take(0, LONG)
        reader.release()
    for connection in writer._acceptor.connections:
        connection.end()  # as its death would
    for reader in readers:
        with pytest.raises(ChannelBroken, match=r"step 1: the writer .*died: its connection ended without a goodbye"):
            reader.take(1, LONG)


@pytest.mark.parametrize("lost", range(READERS))
def test_a_lost_reader_is_told_to_the_writer(ends, lost):
    writer, readers = ends
    writer.put(0, columns_of(0), LONG)
    for reader in readers:
        reader.take(0, LONG)
        reader.release()
    readers[lost]._connection.end()

    def put_more() -> None:
        for step in range(1, 4):  # one more than there are slots
            writer.put(step, {}, LONG)

    with pytest.raises(ChannelBroken, match=r"a reader .*died: its connection ended without a goodbye"):
        put_more()


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_no_thread_and_no_memory_is_left_of_those_that_passed_on(ends):
    writer, readers = ends
    writer.put(0, columns_of(0), LONG)
    for reader in readers:
        reader.take(0, LONG)
        reader.release()
    writer.close()
    for reader in readers:
        with pytest.raises(ChannelClosed):
            reader.take(1, LONG)
        reader.close()
    for thread in threading.enumerate():
        if thread.name.startswith(("relay of", "accept")):
            thread.join(LONG)
            assert not thread.is_alive(), thread
    gc.collect()
    left = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [name for name in left if "memfd:rlgraph edge" in name], "segments are freed"
