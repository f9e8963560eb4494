"""Two processes that see one GPU each: the second receives weights from the first's memory while they are being staged there.

`kill`: the trainer is killed in the middle of a publish.
"""

import multiprocessing
import os
import signal
import sys
from typing import Any

VERSIONS, A_PARAMETER = 5, 1000  # bytes of a bucket: all parameters but the least fill one each


def parameters(version: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(version)
    shapes = {"a": (1000, 1000), "b": (7,), "none": (0, 3), "c": (3000, 5000), "d": (1 << 20,)}
    return {name: torch.randn(*shape, device="cuda") for name, shape in shapes.items()}


def write(address: str, done: Any, kill: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch

    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.host.protocol import More
    from rlgraph.channels.weights.endpoints import WeightsWriter
    from rlgraph.channels.weights.shards import unsharded_weights

    class Dying(HostWriter):
        def _tell(self, token: Any, handle: int | None = None) -> None:
            if kill and isinstance(token, More) and token.tensors == 5 and self.statistics().messages == VERSIONS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._tell(token, handle)

    publisher = WeightsWriter(Dying("weights", 1, 1, b"key", address), torch.bfloat16, A_PARAMETER, checksum=True)
    for version in range(1, VERSIONS + 1):
        publisher.publish(version, unsharded_weights(parameters(version)), 60)
    done.get()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    address = os.path.abspath("w")
    process = context.Process(target=write, args=(address, done, "kill" in sys.argv), daemon=True)
    process.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    import torch

    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader
    from rlgraph.errors import ChannelBroken

    receiver = WeightsReader([HostReader("weights", b"key", address, 60)], buffers=2)
    try:
        for version in range(1, VERSIONS + 1):
            received = receiver.receive(version, 60)
            for name, parameter in parameters(version).items():
                assert torch.equal(received[name], parameter.bfloat16()), (version, name)
            receiver.release()
        print("equal")
    except ChannelBroken as error:
        print("ChannelBroken at version", version, error)
    done.put(None)
    process.join(10)
