"""What only channels in shared memory do: growth, authentication, real processes, and leaving nothing behind."""

import gc
import itertools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from programs.host_peer import START_S, peer

from rlgraph.channels import HostReader, HostWriter
from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout

LONG, SHORT = 120.0, 0.02


def handles() -> dict[int, str]:
    return {
        int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
    }


def is_inheritable(number: int) -> bool:
    with suppress(OSError):  # closed meanwhile, by a thread of an earlier test
        return os.get_inheritable(number)
    return False


def new(before: dict[int, str]) -> dict[int, str]:
    """Return the handles that were not there before. Others may have gone: relays and carriers of an earlier test's channels between
    hosts close theirs on threads of their own, up to a few tenths of a second after `close`."""
    return dict(handles().items() - before.items())


def shared_memory(pid: int) -> set[str]:
    """Return the paths of all shared memory that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm" in line or "memfd:" in line}


def test_a_view_is_the_memory_of_the_slot(make_shm):
    writer, readers = make_shm(readers=2)
    writer.put(0, {"x": torch.arange(8, dtype=torch.uint8)}, LONG)
    views = [reader.take(0, LONG)["x"] for reader in readers]
    [segment] = writer._segments.values()
    segment[segment[:].index(bytes(range(8)))] = 99
    assert [view.tolist() for view in views] == [[99, 1, 2, 3, 4, 5, 6, 7]] * 2


def test_a_slot_keeps_its_views_while_messages_are_laid_out_alike(make_shm):
    writer, [reader] = make_shm(slots=1)
    views = []
    for step, size in enumerate([3, 3, 3, 4, 4]):
        writer.put(step, {"x": torch.full((size,), step), "y": torch.ones(2)}, LONG)
        got = reader.take(step, LONG)
        assert got["x"].tolist() == [step] * size
        views.append(got["x"])
        reader.release()
    assert [new is old for old, new in itertools.pairwise(views)] == [True, True, False, True]


def test_a_batch_that_cannot_be_stored_leaves_the_layout_intact(make_shm):
    writer, [reader] = make_shm(slots=1)
    for step, size in enumerate([2, 3, 2]):
        writer.put(step, {"x": torch.full((size,), float(step))}, LONG)
        assert reader.take(step, LONG)["x"].tolist() == [step] * size
        reader.release()
        with pytest.raises(RuntimeError):
            writer.put(step + 1, {"y": torch.ones(1), "x": torch.ones(size, device="meta")}, LONG)


def test_columns_are_aligned_to_cache_lines(make_shm):
    writer, [reader] = make_shm()
    writer.put(0, {"a": torch.ones(3, dtype=torch.bool), "text": ["x"], "b": torch.ones(5), "c": torch.ones(())}, LONG)
    got = reader.take(0, LONG)
    assert [got[name].data_ptr() % 64 for name in "abc"] == [0, 0, 0]


def test_views_taken_under_inference_mode_serve_autograd(make_shm):
    writer, [reader] = make_shm()
    with torch.inference_mode():
        writer.put(0, {"x": torch.ones(2), "none": torch.ones(0)}, LONG)
        got = reader.take(0, LONG)
    assert not any(column.is_inference() for column in got.values())
    writer.put(1, {"x": torch.ones(2)}, LONG)


def test_a_failed_writer_breaks_the_channel_before_messages_in_the_slots(make_shm):
    writer, [reader] = make_shm()
    writer.put(0, {"x": torch.ones(2)}, LONG)
    writer.fail("out of memory")
    with pytest.raises(ChannelBroken, match=r"'edge', a reader, step 0: the writer .*failed: out of memory"):
        reader.take(0, LONG)


def test_a_slot_grows_for_a_larger_batch_and_earlier_views_stay_intact(make_shm):
    writer, [reader] = make_shm(slots=2)
    writer.put(0, {"x": torch.full((10,), 1.0)}, LONG)
    held = reader.take(0, LONG)["x"]
    for step in range(1, 12):
        writer.put(step, {"x": torch.full((4**step % 10**6,), float(step))}, LONG)
        assert reader.take(step, LONG)["x"].unique().tolist() == [step]
        if step == 1:
            assert held.tolist() == [1.0] * 10
        reader.release()
    writer.put(12, {"x": torch.zeros(3)}, LONG)
    assert reader.take(12, LONG)["x"].tolist() == [0, 0, 0]


def test_old_memory_of_a_slot_that_grew_is_freed_with_its_last_view(make_shm):
    gc.collect()
    before = {handle for handle, path in handles().items() if "memfd:rlgraph edge" in path}
    writer, [reader] = make_shm(slots=1)
    for step, size in enumerate([10, 10**5, 10**6]):
        writer.put(step, {"x": torch.ones(size)}, LONG)
        reader.take(step, LONG)
        reader.release()
    gc.collect()
    after = {handle for handle, path in handles().items() if "memfd:rlgraph edge" in path}
    assert len(after - before) == 2  # one mapping at each end


def test_a_batch_that_cannot_be_stored_leaves_its_slot_free(make_shm):
    writer, [reader] = make_shm(slots=1)
    with pytest.raises(RuntimeError):
        writer.put(0, {"x": torch.ones(2, device="meta")}, LONG)
    writer.put(0, {"x": torch.ones(2)}, LONG)
    assert reader.take(0, LONG)["x"].tolist() == [1, 1]


def test_the_first_put_waits_for_all_readers(tmp_path):
    address = str(tmp_path / "a")
    writer = HostWriter("edge", 1, 2, b"key", address)
    one = HostReader("edge", b"key", address, LONG)
    with pytest.raises(ChannelTimeout, match=r"step 0: waited 0\.02 s, 1 of 2 readers have connected"):
        writer.put(0, {}, SHORT)
    two = HostReader("edge", b"key", address, LONG)
    writer.put(0, {}, LONG)
    assert (one.take(0, LONG), two.take(0, LONG)) == ({}, {})
    for end in (writer, one, two):
        end.close()


def test_a_reader_waits_for_its_writer(tmp_path):
    address = str(tmp_path / "a")
    readers = []
    thread = threading.Thread(target=lambda: readers.append(HostReader("edge", b"key", address, LONG)))
    thread.start()
    writer = HostWriter("edge", 1, 1, b"key", address)
    thread.join()
    writer.put(0, {}, LONG)
    assert readers[0].take(0, LONG) == {}
    writer.close()
    readers[0].close()


def test_a_reader_without_a_writer_times_out(tmp_path):
    with pytest.raises(ChannelTimeout, match=r"channel 'edge', a reader: waited 0\.02 s, no writer listens at"):
        HostReader("edge", b"key", str(tmp_path / "a"), SHORT)


def test_a_wrong_authkey_is_refused_and_leaves_the_place_free(tmp_path):
    address = str(tmp_path / "a")
    writer = HostWriter("edge", 1, 1, b"key", address)
    with pytest.raises(ChannelError, match="refused the authkey"):
        HostReader("edge", b"another", address, LONG)
    reader = HostReader("edge", b"key", address, LONG)
    writer.put(0, {}, LONG)
    assert reader.take(0, LONG) == {}
    writer.close()
    reader.close()


def test_a_socket_path_that_is_too_long_is_refused():
    with pytest.raises(ChannelError, match=r"channel 'edge': the socket path .* has 200 bytes"):
        HostWriter("edge", 1, 1, b"key", "/" + "a" * 199)


def test_a_waiting_reader_sleeps_until_its_message_comes(make_shm):
    writer, [reader] = make_shm()
    done = threading.Event()
    used = []

    def read() -> None:
        since = time.thread_time()
        reader.take(0, LONG)
        used.append(time.thread_time() - since)
        done.set()

    threading.Thread(target=read).start()
    assert not done.wait(0.5)
    writer.put(0, {}, LONG)
    assert done.wait(LONG)
    assert used[0] < 0.05  # a tenth of half a second
    assert 0.4 < reader.statistics().blocked_s < LONG


def test_a_timed_out_writer_was_blocked_for_its_deadline(make_shm):
    writer, _ = make_shm(slots=1)
    writer.put(0, {}, LONG)
    with pytest.raises(ChannelTimeout):
        writer.put(1, {}, 0.1)
    assert 0.1 <= writer.statistics().blocked_s < LONG


@pytest.mark.parametrize(("method", "error"), [("close", ChannelClosed), ("fail", ChannelBroken)])
@pytest.mark.parametrize("role", ["writer", "reader"])
def test_another_thread_ends_a_wait(make_shm, role, method, error):
    writer, [reader] = make_shm(slots=1)
    if role == "writer":
        writer.put(0, {}, LONG)
    end, wait = (writer, writer.put) if role == "writer" else (reader, reader.take)
    arguments = (1, {}, LONG) if role == "writer" else (0, LONG)
    stopper = threading.Timer(0.1, getattr(end, method), ["stopped"] if method == "fail" else [])
    stopper.start()
    since = time.monotonic()
    with pytest.raises(error, match="this end"):
        wait(*arguments)
    assert time.monotonic() - since < LONG / 2


def test_another_thread_ends_a_wait_for_readers(tmp_path):
    writer = HostWriter("edge", 1, 1, b"key", str(tmp_path / "a"))
    threading.Timer(0.1, writer.close).start()
    with pytest.raises(ChannelClosed):
        writer.put(0, {}, LONG)


def test_a_path_is_that_of_one_channel(tmp_path):
    address = str(tmp_path / "a")
    writer = HostWriter("edge", 1, 1, b"key", address)
    with pytest.raises(ChannelError, match=r"channel 'other': .* is in use"):
        HostWriter("other", 1, 1, b"key", address)
    writer.close()


def test_a_killed_writer_breaks_the_channel_long_before_the_deadline_and_leaves_nothing(tmp_path):
    address = str(tmp_path / "a")
    with peer("write", address, 2) as (process, done):
        reader = HostReader("edge", b"key", address, START_S)
        kept = reader.take(0, LONG)["x"]
        assert done.poll(LONG)
        assert shared_memory(process.pid) == {"/memfd:rlgraph edge (deleted)"}  # which has no name that could be left
        threading.Timer(0.2, process.kill).start()
        reader.take(1, LONG)
        since = time.monotonic()
        with pytest.raises(ChannelBroken, match=rf"'edge', a reader, step 2: the writer \(process {process.pid}\) died"):
            reader.take(2, LONG)
        assert time.monotonic() - since < LONG / 2
        assert kept.tolist() == [0] * 1000
        reader.close()
    assert os.listdir(tmp_path) == []


def test_a_killed_reader_breaks_the_channel_long_before_the_deadline(tmp_path):
    address = str(tmp_path / "a")
    writer = HostWriter("edge", 2, 1, b"key", address)
    with peer("read", address, 1) as (process, _):
        for step in range(3):
            writer.put(step, {"x": torch.full((1000,), step)}, START_S)
        threading.Timer(0.2, process.kill).start()
        since = time.monotonic()
        with pytest.raises(ChannelBroken, match=rf"'edge', the writer, step 3: a reader \(process {process.pid}\) died"):
            writer.put(3, {}, LONG)
        assert time.monotonic() - since < LONG / 2
    writer.close()


@pytest.mark.parametrize("last", ["writer", "reader"])
def test_nothing_is_left_after_close(make_shm, tmp_path, last):
    before, shared = handles(), shared_memory(os.getpid())
    writer, [reader] = make_shm()
    for step in range(5):
        writer.put(step, {"x": torch.ones(10**step)}, LONG)
        reader.take(step, LONG)
        reader.release()
    ends = [reader, writer] if last == "writer" else [writer, reader]
    for end in ends:
        end.close()
    assert new(before) == {}
    assert shared_memory(os.getpid()) <= shared
    assert os.listdir(tmp_path) == []


def test_a_writer_closed_before_its_readers_came_leaves_nothing(tmp_path):
    before, threads = handles(), set(threading.enumerate())
    writer = HostWriter("edge", 1, 2, b"key", str(tmp_path / "a"))
    reader = HostReader("edge", b"key", str(tmp_path / "a"), LONG)
    writer.close()
    with pytest.raises(ChannelClosed):
        reader.take(0, LONG)
    reader.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(LONG)
    assert (new(before), set(threading.enumerate()) - threads, os.listdir(tmp_path)) == ({}, set(), [])


def test_no_handle_is_inherited_by_child_processes(make_shm):
    before = handles()
    writer, [reader] = make_shm()
    writer.put(0, {"x": torch.ones(3)}, LONG)
    reader.take(0, LONG)
    assert [path for number, path in new(before).items() if is_inheritable(number)] == []


def test_views_outlive_both_ends(make_shm):
    writer, [reader] = make_shm()
    writer.put(0, {"x": torch.arange(3)}, LONG)
    view = reader.take(0, LONG)["x"]
    writer.close()
    reader.close()
    assert view.tolist() == [0, 1, 2]
