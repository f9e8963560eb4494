"""Trainer ranks and generators as processes on one GPU: any cut of any parameters is copied from peer to peer, bit for bit."""

import multiprocessing
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.weight_cuts import as_bfloat16, next_version, random_cut, random_weights, tensor_bytes

from rlgraph.channels import Site, open_reader, open_writer
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter

SEEDS, TRAINERS, GENERATORS, VERSIONS, LONG = range(8), 3, 2, 4, 120.0


def address(seed: int, rank: int) -> str:
    return str(Path.cwd() / f"{seed}.{rank}")


def site(seed: int, rank: int) -> Site:
    return Site("weights", 2, GENERATORS, address(seed, rank), b"key", timeout_s=LONG)


def write(rank: int, turn: Any) -> None:
    """Be a trainer rank: publish some versions for each seed, each cut in another way."""
    for seed in SEEDS:
        draw = random.Random(seed)
        ranks, bucket, checksum = draw.randint(1, TRAINERS), draw.choice([None, 1, 64]), draw.random() < 0.5
        weights = random_weights(draw)
        if rank < ranks:
            writer = open_writer("peer", site(seed, rank))
            publisher = WeightsWriter(writer, torch.bfloat16, bucket, checksum)
            for version in range(1, VERSIONS + 1):
                shards = random_cut(random.Random(100 * seed + version), next_version(weights, version), ranks)[rank]
                publisher.publish(version, [replace(shard, tensor=shard.tensor.cuda()) for shard in shards], LONG)
        turn.wait(LONG)
        if rank < ranks:
            writer.close()


def read(buffers: int, turn: Any, found: Any) -> None:
    """Be a generator: receive each version, and compare it with the weights that were cut."""
    for seed in SEEDS:
        draw = random.Random(seed)
        ranks, _, _ = draw.randint(1, TRAINERS), draw.choice([None, 1, 64]), draw.random()
        weights = random_weights(draw)
        reader = WeightsReader([open_reader("peer", site(seed, rank)) for rank in range(ranks)], buffers)
        for version in range(1, VERSIONS + 1):
            received = reader.receive(version, LONG)
            assert received.keys() == weights.keys()
            for name, tensor in next_version(weights, version).items():
                assert received[name].is_cuda, name
                assert received[name].shape == tensor.shape, name
                assert tensor_bytes(received[name].cpu()) == tensor_bytes(as_bfloat16(tensor)), (seed, version, name)
            del received
            reader.release()
        turn.wait(LONG)
    found.put(len(SEEDS))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    turn, found = context.Barrier(TRAINERS + GENERATORS), context.Queue()
    processes = [context.Process(target=write, args=(rank, turn), daemon=True) for rank in range(TRAINERS)]
    processes += [context.Process(target=read, args=(buffers, turn, found), daemon=True) for buffers in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0, process
    print("equal", found.get() + found.get())
