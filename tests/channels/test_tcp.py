"""What only channels between hosts do: relays over TCP, ports, and peers whose host is gone."""

import gc
import os
import socket
import threading
import time

import pytest
import torch
from programs.host_peer import START_S, peer

from rlgraph.channels import HostReader, HostWriter
from rlgraph.channels.host import protocol
from rlgraph.errors import ChannelBroken, ChannelError

LONG = 120.0
HERE = "127.0.0.1:0"


def test_large_messages_cross_while_neither_end_waits_for_the_other(make_shm):
    writer, [reader] = make_shm(slots=3, address=HERE)
    for step in range(3):  # 24 MiB, more than the sockets hold
        writer.put(step, {"x": torch.full((2**20,), float(step), dtype=torch.float64)}, LONG)
    for step in range(3):
        assert reader.take(step, LONG)["x"].unique().tolist() == [step]
        reader.release()


def test_a_port_in_use_is_refused_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ChannelError, match=f"'edge' cannot listen at '{address}': .*another program has that port; leave it 0"):
            HostWriter("edge", 1, 1, b"key", address)


def test_an_address_of_no_interface_is_refused():
    with pytest.raises(ChannelError, match="no network interface of this host has that address"):
        HostWriter("edge", 1, 1, b"key", "203.0.113.7:0")


def test_a_wrong_key_is_refused_over_tcp():
    writer = HostWriter("edge", 1, 1, b"key", HERE)
    with pytest.raises(ChannelError, match="refused the authkey"):
        HostReader("edge", b"another", writer.address, LONG)
    writer.close()


def test_a_reader_on_another_host_that_is_killed_breaks_the_channel_long_before_the_deadline():
    writer = HostWriter("edge", 2, 1, b"key", HERE)
    with peer("read", writer.address, 1) as (process, _):
        for step in range(3):
            writer.put(step, {"x": torch.full((1000,), step)}, START_S)
        threading.Timer(0.2, process.kill).start()
        since = time.monotonic()
        with pytest.raises(ChannelBroken, match=r"'edge', the writer, step 3: a reader \(at 127.0.0.1, port \d+\) died"):
            writer.put(3, {}, LONG)
        assert time.monotonic() - since < LONG / 2
    writer.close()


def test_no_thread_and_no_handle_is_left_when_both_ends_have_closed():
    gc.collect()  # what other tests left open is not to close in the middle of this one
    for thread in threading.enumerate():
        if thread.name.startswith("relay of"):  # of a channel that has just ended
            thread.join(LONG)
    threads, handles = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    writer = HostWriter("edge", 2, 1, b"key", HERE)
    reader = HostReader("edge", b"key", writer.address, LONG)
    writer.put(0, {"x": torch.ones(10)}, LONG)
    reader.take(0, LONG)
    reader.release()
    writer.close()
    reader.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(LONG)
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) == handles


def test_a_writer_that_goes_away_while_a_reader_joins_is_a_broken_channel_with_its_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        with pytest.raises(ChannelBroken, match=r"the writer at .* is gone") as caught:
            protocol.connect("rollout", f"127.0.0.1:{listener.getsockname()[1]}", b"k" * 32, 10)
        thread.join()
    assert (caught.value.channel, caught.value.host) == ("rollout", "127.0.0.1")
    with pytest.raises(ChannelBroken, match="is gone"):
        protocol.connect("rollout", "127.0.0.1:1", b"k" * 32, 10)
