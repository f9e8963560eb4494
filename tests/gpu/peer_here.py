"""Two processes that see one GPU each: the second reads the memory of the first's. `kill`: the writer is killed first."""

import multiprocessing
import os
import signal
import sys
from typing import Any


def write(address: str, done: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch

    from rlgraph.channels.shm import ShmWriter

    writer = ShmWriter("weights", 1, 1, b"key", address)
    for step in range(3):
        columns = {"a": torch.arange(1000, device="cuda", dtype=torch.float32) + step, "b": torch.full((3, 5), step, device="cuda")}
        writer.put(step, columns, 60, dtype=torch.bfloat16)
    done.get()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    address = os.path.abspath("w")
    process = context.Process(target=write, args=(address, done), daemon=True)
    process.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    import torch

    from rlgraph.channels.shm import ShmReader
    from rlgraph.channels.staging import Staging
    from rlgraph.errors import ChannelBroken

    reader, staging = ShmReader("weights", b"key", address, 60), Staging()
    for step in range(3):
        staging.fill([reader.take(step, 60)])  # type: ignore[list-item]
        assert torch.equal(staging.weights["a"], (torch.arange(1000.0) + step).to(torch.bfloat16).cuda())
        assert torch.equal(staging.weights["b"], torch.full((3, 5), step).cuda())
        if step == 2 and "kill" in sys.argv:
            os.kill(process.pid, signal.SIGKILL)
        reader.release()
    if "kill" in sys.argv:
        try:
            reader.take(3, 5)
        except ChannelBroken as error:
            print("ChannelBroken", error)
    else:
        print("equal")
    done.put(None)
    process.join(10)
