"""Two workers of one Ray with a GPU each: Ray's accelerator channel carries columns and weights, beside memory that the reader maps.

python tests/gpu/ray_here.py            on a machine of two GPUs
python tests/gpu/ray_here.py --smoke    on CPUs, by the twin "ray gloo"
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch

from rlgraph.channels import Site, open_reader, open_writer
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.channels.weights.shards import unsharded_weights

SMOKE = "--smoke" in sys.argv
SIZES = (10, 1_000_000, 3, 0, 1_000) if SMOKE else (10, 50_000_000, 3, 0, 1_000_000)
BYTES = 1 << (20 if SMOKE else 28)
HOPS, VERSIONS, LIMIT_S = 10, 4, 85.0
DEVICE = "cpu" if SMOKE else "cuda"


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(1000, 1000, generator=generator).bfloat16(), "b": torch.randn(7, generator=generator).bfloat16()}


class End:
    def listen(self, transport: str, path: str) -> str:
        self.writer = open_writer(transport, Site("edge", 2, 1, path, b"key"))
        return self.writer.address

    def join(self, transport: str, address: str) -> None:
        self.reader = open_reader(transport, Site("edge", 2, 1, address, b"key", timeout_s=30))

    def write(self) -> None:
        for step, size in enumerate(SIZES):
            columns = {"x": torch.arange(size, device=DEVICE), "mask": torch.arange(size) % 3 == 0, "who": [str(step)]}
            self.writer.put(step, columns, 30)
        publisher = WeightsWriter(self.writer, torch.bfloat16)
        for version in range(len(SIZES), len(SIZES) + VERSIONS):
            publisher.publish(version, unsharded_weights({name: x.to(DEVICE) for name, x in weights_of(version).items()}), 30)
        source = torch.ones(BYTES, dtype=torch.uint8, device=DEVICE)
        for step in range(100, 100 + HOPS):
            self.writer.put(step, {"x": source}, 30)

    def read(self) -> list[float]:
        for step, size in enumerate(SIZES):
            got = self.reader.take(step, 30)
            assert torch.equal(got["x"], torch.arange(size, device=DEVICE)), step
            assert torch.equal(got["mask"], torch.arange(size) % 3 == 0)
            assert got["who"] == [str(step)]
            assert got["x"].device.type == DEVICE
            del got
            self.reader.release()
        receiver = WeightsReader([self.reader], buffers=1, first=len(SIZES))
        for version in range(len(SIZES), len(SIZES) + VERSIONS):
            received = receiver.receive(version, 30)
            for name, wanted in weights_of(version).items():
                assert torch.equal(received[name].cpu(), wanted), (version, name)
            receiver.release()
        into, ends = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE), []
        for step in range(100, 100 + HOPS):
            into.copy_(self.reader.take(step, 30)["x"])
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            ends.append(time.monotonic())
            self.reader.release()
        return ends

    def close(self) -> None:
        for end in (vars(self).get("writer"), vars(self).get("reader")):
            if end is not None:
                end.close()


def run(transport: str, ends: list[Any], folder: str) -> None:
    print(f"{transport}: connecting", flush=True)
    writer, reader = ends
    address = ray.get(writer.listen.remote(transport, f"{folder}/{transport.replace(' ', '_')}"), timeout=30)
    ray.get(reader.join.remote(transport, address), timeout=30)
    _, stops = ray.get([writer.write.remote(), reader.read.remote()], timeout=40)
    each = (stops[-1] - stops[1]) / (HOPS - 2)
    print(f"{transport}: bits equal; {HOPS} messages of {BYTES >> 20} MiB, {each * 1e3:.2f} ms each", flush=True)
    ray.get([end.close.remote() for end in ends], timeout=10)


if __name__ == "__main__":
    watchdog = threading.Timer(LIMIT_S, lambda: (print(f"FAILED: more than {LIMIT_S:g} s", flush=True), os._exit(1)))
    watchdog.daemon = True
    watchdog.start()
    ray.init("local", include_dashboard=False, num_cpus=1, num_gpus=0, object_store_memory=2 << 30, logging_level="ERROR")
    visible = [str(Path.cwd()), *sys.path]
    ends = [
        ray.remote(End)
        .options(num_cpus=0, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": ":".join(visible)}})
        .remote()
        for gpu in range(2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for transport in ("ray gloo", "shm") if SMOKE else ("ray nccl", "peer"):
            run(transport, ends, folder)
    ray.shutdown()
    print("ok", flush=True)
