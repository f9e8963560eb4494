"""Seconds of one hop of a torch tensor through Ray Direct Transport (gloo), beside rlgraph's channel in shared memory.

    python benchmarks/speed/direct_transport.py [--json PATH]
    python benchmarks/speed/direct_transport.py --smoke          # 1 KiB only

A hop of Direct Transport is two actor calls of the driver: one makes the tensor, the other receives it. It lasts from the first call to the
moment the taking method has the tensor. Hops of the channel are measured as `channels.py` does.
"""

import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import ray
import torch
from ray.experimental.collective import create_collective_group

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.hops import KIB, MIB, Row, row
from benchmarks.speed.channels import measure_ours, stop, tensor

COUNTS = {KIB: 100, MIB: 50, 256 * MIB: 10}


class End:
    """One of the two actors."""

    def make(self, size: int) -> None:
        self.made = tensor(size)

    def again(self) -> torch.Tensor:
        return self.made

    def take(self, taken: torch.Tensor) -> float:
        return time.monotonic()


def measure_direct(size: int, count: int) -> Row:
    """Measure hops of a tensor that the first actor has made already."""
    worker: Any = ray.remote(enable_tensor_transport=True, num_cpus=1)(End)
    sender, receiver = worker.remote(), worker.remote()
    create_collective_group([sender, receiver], backend="gloo")
    ray.get(sender.make.remote(size))
    again = sender.again.options(tensor_transport="gloo")
    hops = []
    for _ in range(count):
        since = time.monotonic()
        hops.append(ray.get(receiver.take.remote(again.remote())) - since)
    stop(sender, receiver)
    return row("Ray Direct Transport", size, hops)


def main() -> None:
    given = command_line(__doc__, smoke="1 KiB only").parse_args()
    folder, rows = tempfile.mkdtemp(prefix="rlgraph-"), []
    ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False, logging_level="error", object_store_memory=2**29)
    try:
        for size, count in list(COUNTS.items())[: 1 if given.smoke else None]:
            rows += [measure_ours("shm", size, count, folder)[0], measure_direct(size, count)]
            print(*rows[-2:], sep="\n", flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    write_measured(given.json, {"script": "benchmarks/speed/direct_transport.py", "hops": [asdict(each) for each in rows]})


if __name__ == "__main__":
    main()
