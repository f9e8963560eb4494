"""Two processes that see one GPU each, as if on two hosts: NCCL carries columns and weights. `kill`: the writer is killed on the way."""

import multiprocessing
import os
import signal
import sys
from typing import Any

VERSIONS, SIZES = 4, (10, 50_000_000, 3, 0, 1_000_000)


def write(addresses: Any, done: Any, kill: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch

    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.remote.transfer import Nccl
    from rlgraph.channels.weights.endpoints import WeightsWriter
    from rlgraph.channels.weights.shards import unsharded_weights

    batches, weights = (HostWriter(name, 2, 1, b"key", "127.0.0.1:0", "nccl") for name in ("batches", "weights"))
    addresses.put((batches.address, weights.address))
    for step, size in enumerate(SIZES):
        columns = {"x": torch.arange(size, device="cuda"), "mask": torch.arange(size) % 3 == 0, "who": [str(step)]}
        batches.put(step, columns, 60)
    publisher = WeightsWriter(weights, torch.bfloat16)
    for version in range(1, VERSIONS + 1):
        torch.manual_seed(version)
        publisher.publish(version, unsharded_weights({"a": torch.randn(1000, 1000, device="cuda"), "b": torch.randn(7, device="cuda")}), 60)
    done.get()
    if kill:
        Nccl.send = lambda self, memory: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
        batches.put(len(SIZES), {"x": torch.ones(1 << 20, device="cuda")}, 60)
    done.get()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    addresses, done = context.Queue(), context.Queue()
    process = context.Process(target=write, args=(addresses, done, "kill" in sys.argv), daemon=True)
    process.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    import torch

    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader
    from rlgraph.errors import ChannelBroken

    batches, weights = (HostReader(name, b"key", at, 60) for name, at in zip(("batches", "weights"), addresses.get(), strict=True))
    receiver = WeightsReader([weights], buffers=2)
    for step, size in enumerate(SIZES):
        got = batches.take(step, 60)
        assert torch.equal(got["x"], torch.arange(size, device="cuda")), step
        assert torch.equal(got["mask"], torch.arange(size) % 3 == 0)
        assert got["who"] == [str(step)]
        assert got["x"].is_cuda
        del got
        batches.release()
    for version in range(1, VERSIONS + 1):
        received = receiver.receive(version, 60)
        torch.manual_seed(version)
        for name, shape in (("a", (1000, 1000)), ("b", (7,))):
            assert torch.equal(received[name], torch.randn(*shape, device="cuda").bfloat16()), (version, name)
        receiver.release()
    done.put(None)
    if "kill" in sys.argv:
        try:
            batches.take(len(SIZES), 20)
        except ChannelBroken as error:
            print("ChannelBroken", error)
    else:
        print("equal")
    done.put(None)
    process.join(10)
