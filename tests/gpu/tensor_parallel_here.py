"""An engine over two GPUs: `llama|qwen3|experts|experts_apart` loads weights in every way they can arrive, and compares with the loader of
the model on each rank; `kill` ends its process with SIGKILL and waits for the ranks to go. `experts` is a mixture whose ranks each have
a part of every expert, and `experts_apart` one whose ranks have whole experts of their own."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
FACTORS = (1.0, 1.5, 0.75, 1.25)  # by version; 0 is the folder's


def model(kind: str) -> Path:
    """Return the tiny Llama, whose only key head both ranks have, a Qwen3 with one for each (both pad their vocabulary), or a mixture."""
    from support.tiny import tiny_llama, tiny_mixture, tiny_qwen

    if kind == "llama":
        return tiny_llama(Path("model"))
    if kind.startswith("experts"):
        return tiny_mixture(Path("model"), num_experts=8, hidden_size=256, head_dim=64, num_attention_heads=8, moe_intermediate_size=128)
    return tiny_qwen(Path(), "qwen3", vocab=32_001, heads=8, head=128, layers=4)


def versions(folder: Path) -> list[dict[str, Any]]:
    """Return the weights of every version on this process's first GPU."""
    import torch
    from safetensors.torch import load_file

    weights = {name: weight.cuda().to(torch.bfloat16) for name, weight in load_file(folder / "model.safetensors").items()}
    return [{name: weight * factor for name, weight in weights.items()} for factor in FACTORS]


def sums(tensors: Any) -> dict[str, int]:
    import torch

    return {name: int(tensor.view(torch.int16).sum(dtype=torch.int64)) for name, tensor in tensors}


def write(folder: Path, address: str, done: Any) -> None:
    """Publish the last version from the second GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    import torch

    from rlgraph.channels.host.channel import HostWriter

    writer = HostWriter("weights", 1, 1, b"key", address)
    writer.put(0, versions(folder)[-1], 60, dtype=torch.bfloat16)
    done.get()
    writer.close()


def on_rank(worker: Any) -> dict[str, Any]:
    """Return what one rank has: the bits of the weights it maps and of its parameters, whether the loader leaves the same, and copies."""
    import torch

    state, part = worker.rank_weights, worker.get_model()
    before = {name: parameter.clone() for name, parameter in part.named_parameters()}
    part.load_weights(iter(state.weights.items()))
    same = {name: torch.equal(parameter, before[name]) for name, parameter in part.named_parameters()}
    return {
        "mapped": sums(state.weights.items()),
        "parameters": sums(before.items()),
        "others": [name for name, equal in same.items() if not equal],
        "copies": 0 if state.plan is None else len(state.plan.copies),
    }


def experts_of(worker: Any) -> list[int]:
    """Count the experts that one rank has in each layer."""
    return [len(parameter) for name, parameter in worker.get_model().named_parameters() if name.endswith("w13_weight")]


def check(engine: Any, weights: dict[str, Any]) -> list[dict[str, int]]:
    """Compare both ranks with the weights that were loaded last, and return the bits of their parameters."""
    ranks = engine.llm.collective_rpc(on_rank)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["mapped"] == sums(weights.items()), "what the rank maps is not what was loaded"
        assert not rank["others"], f"not as the loader leaves them: {rank['others']}"
        assert rank["copies"], "the loader was not recorded"
    return [rank["parameters"] for rank in ranks]


def loads(kind: str) -> None:
    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import Staging
    from rlgraph.channels.weights.shards import unsharded_weights
    from rlgraph.engines.api import Request
    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    folder, sampling = model(kind), Sampling(max_tokens=12, ignore_eos=True)
    prompts, seeds = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], [1, 2, 3]
    given = {"enable_expert_parallel": True} if kind == "experts_apart" else {}
    size = {"max_model_len": 64, "kv_cache_bytes": 256 << 20, "max_sequences": 16}
    engine = VllmEngine(folder, shared=True, tensor_parallel=2, engine_args=given, **size)
    if kind.startswith("experts"):
        own = engine.llm.collective_rpc(experts_of)
        print("experts of each rank", own)
        assert own == ([[4, 4]] * 2 if given else [[8, 8]] * 2)

    def responses() -> list[list[int]]:
        return [response.tokens for response in engine.generate(prompts, sampling, seeds)]

    def interrupted() -> list[tuple[list[int], list[int]]]:
        """Take version 1 in the middle of responses of version 0, with steps under way."""
        engine.load_weights(known[0], version=0)
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            engine.submit(Request(f"{number}", prompt, sampling, seed))
        done = {}
        for _ in range(6):
            done |= engine.step()
        engine.load_weights(known[1], version=1)
        while len(done) < len(prompts):
            done |= engine.step()
        return [(done[f"{number}"].tokens, done[f"{number}"].versions) for number in range(len(prompts))]

    first = responses()
    assert responses() == first, "the same seeds, other tokens"
    known = versions(folder)
    engine.load_weights(known[0])  # tensors of their own, which are copied together
    bits = [check(engine, known[0])]
    assert responses() == first, "the folder's weights, other tokens"
    print("version 0: as in the folder")

    staging = Staging()
    for version in (1, 2):  # one memory of this process: described once, and replayed
        staging.fill([list(unsharded_weights(known[version]))])
        engine.load_weights(staging.weights)
        bits.append(check(engine, known[version]))
        print(f"version {version}: loaded from one memory")

    engine.sleep()
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    address = os.path.abspath("w")
    process = context.Process(target=write, args=(folder, address, done), daemon=True)
    process.start()
    reader = HostReader("weights", b"key", address, 60)
    engine.load_weights(reader.take(0, 60))  # type: ignore[arg-type]  # another process's memory, on the second GPU
    bits.append(check(engine, known[3]))
    engine.wake()
    responses()
    done.put(None)
    process.join(10)
    print("version 3: loaded from another process, asleep")
    for rank in (0, 1):
        assert len({tuple(version[rank].items()) for version in bits}) == len(bits), "two versions left the same parameters"

    once = interrupted()
    assert once == interrupted(), "the same seeds and weights at the same steps, other tokens"
    assert {0, 1} == {version for _, tokens in once for version in tokens}, once
    engine.load_weights(known[0])
    assert responses() == first
    engine.close()
    assert not [child for child in multiprocessing.active_children() if "Vllm" in child.name]
    print("equal")


def pid(worker: Any) -> int:
    return os.getpid()


def hold() -> None:
    from rlgraph.engines.vllm.engine import VllmEngine

    engine = VllmEngine(model("llama"), max_model_len=64, kv_cache_bytes=256 << 20, max_sequences=16, memory=0.3, tensor_parallel=2)
    print("ranks", *engine.llm.collective_rpc(pid), flush=True)
    sys.stdin.read()


def runs(process: str) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill() -> None:
    command = [sys.executable, __file__, "hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = next(line.split()[1:] for line in process.stdout if line.startswith("ranks"))
        process.kill()
    end = time.monotonic() + 30
    while left := [rank for rank in ranks if runs(rank)]:
        assert time.monotonic() < end, f"ranks {left} outlive their engine"
        time.sleep(0.1)
    print("gone", len(ranks))


if __name__ == "__main__":
    {"kill": kill, "hold": hold}.get(sys.argv[1], lambda: loads(sys.argv[1]))()
