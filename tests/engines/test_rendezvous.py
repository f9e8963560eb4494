"""Ranks of several hosts meet at a socket that is bound once and never let go."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.forked_workers import server

from rlgraph.channels.host.connection import bound, listen
from rlgraph.engines.fsdp.sharding import meet
from rlgraph.errors import ChannelError


def be_rank(at: str, rank: int, listener: socket.socket | None, out: Path) -> None:
    meet(at, rank, 2, listener.detach() if listener else -1)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    found = [line.split()[1] for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    port = f"{int(at.rpartition(':')[2]):04X}"
    (out / f"{rank}").write_text(f"{int(total)} {[a.split(':')[0] for a in found if a.endswith(port)]}")
    dist.destroy_process_group()


def test_the_port_of_rank_0_stays_its_own_until_the_others_come_and_is_open_at_one_address(tmp_path: Path) -> None:
    listener = listen("ranks", "127.0.0.1:0", 2)
    at = bound(listener)
    with pytest.raises(ChannelError, match="another program has that port"):
        listen("another", at, 1)
    ranks = [server.Process(target=be_rank, args=(f"tcp://{at}", rank, (listener, None)[rank], tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    listener.close()
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["3 ['0100007F']"] * 2
