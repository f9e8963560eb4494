"""Router replay: how far the trainer's log-probs are from the engine's, with its own routers and with the engine's routes.

    python benchmarks/speed/router_replay.py [--layers 4] [--prompts 64] [--tokens 256] --json OUT.json
    python benchmarks/speed/router_replay.py --smoke            # its first seconds

A random Qwen 3 MoE: on a GPU in the shape of 30B-A3B with fewer layers, on a CPU a small one. vLLM samples in bfloat16, in a process of
its own, with and without routes, whose tokens and seconds are compared. Then the trainer scores every token, in bfloat16 and in float32.
Random weights have more near ties between experts than trained ones. Half of the prompts are given twice, so that the second one finds
its tokens in the engine's cache.
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.served import say
from benchmarks.speed.exact_gpu import batch_of, texts

SMALL = {"hidden_size": 256, "moe_intermediate_size": 128, "heads": 8, "kv": 2, "head_dim": 32, "experts": 32, "chosen": 4, "vocab": 2048}
LARGE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "heads": 32,
    "kv": 4,
    "head_dim": 128,
    "experts": 128,
    "chosen": 8,
    "vocab": 151936,
}
LENGTHS, ROUNDS = (20, 150, 300), 3


def made(folder: Path, shape: dict[str, int], layers: int, device: str) -> None:
    """Write a random model."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden_size"],
        intermediate_size=3 * shape["hidden_size"],
        moe_intermediate_size=shape["moe_intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        num_experts=shape["experts"],
        num_experts_per_tok=shape["chosen"],
        norm_topk_prob=True,
        max_position_embeddings=4096,
        rope_theta=1e6,
        initializer_range=0.02 if shape is LARGE else 0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def sample(folder: str, cuda: bool, prompts: list[list[int]], tokens: int, routes: bool, out: str) -> None:
    """In a process of the engine: sample `ROUNDS` times after a first one that is not timed."""
    import torch

    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    where: dict[str, Any] = {"memory": 0.5} if cuda else {"threads": 1, "kv_cache_bytes": 256 << 20}
    engine = VllmEngine(folder, max_model_len=1024, dtype="bfloat16", max_sequences=len(prompts), routes=routes, **where)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    times: list[float] = []
    for again in range(1 + ROUNDS):
        start = time.perf_counter()
        seeds = [again * len(prompts) + row for row in range(len(prompts))]
        found = engine.generate([[*prompt[:-1], 5 + again] for prompt in prompts], sampling, seeds)
        times.append(time.perf_counter() - start)
    rows = [([*prompt[:-1], 5 + again], list(r.tokens), list(r.log_probs), r.routes) for prompt, r in zip(prompts, found, strict=True)]
    torch.save((times[1:], rows), out)
    engine.close()


def sampled(folder: str, cuda: bool, prompts: list[list[int]], tokens: int, routes: bool, out: str) -> Any:
    """Sample in a process of its own, which leaves the device when it ends."""
    import torch

    process = multiprocessing.get_context("spawn").Process(target=sample, args=(folder, cuda, prompts, tokens, routes, out))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the engine's process ended with {process.exitcode}")
    return torch.load(out)


def away(own: Any, rows: list[Any]) -> dict[str, float]:
    """Measure how far log-probs are from the engine's."""
    import torch

    apart = own - torch.tensor([log_probs for _, _, log_probs, _ in rows])
    most = apart.abs().flatten().sort().values
    k3 = torch.expm1(apart.double()) - apart.double()
    return {
        "mean": most.mean().item(),
        "p99": most[int(0.99 * len(most))].item(),
        "most": most[-1].item(),
        "k3_kl": k3.mean().item(),
    }


def scored(folder: str, cuda: bool, dtype: str, rows: list[Any]) -> dict[str, Any]:
    """Score with own routers and with the engine's routes; count how many choices of the trainer are the engine's."""
    import torch

    import rlgraph as rg
    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.nodes.rollout.decode_loop import routes_of
    from rlgraph.values.trainer import TrainerSettings

    batch = batch_of([(prompt, tokens) for prompt, tokens, _, _ in rows])
    told = routes_of([row[0] for row in rows], [_Told(row[3]) for row in rows])  # type: ignore[misc]
    device = "cuda" if cuda else "cpu"
    given: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype), "flat": True}
    settings = TrainerSettings(optimizer=rg.AdamW(lr=1e-5), router_replay=True, micro_batch_tokens=8192 if cuda else 2048)
    engine = FsdpEngine(PolicyHead(folder), settings, **given)
    found: dict[str, Any] = {}
    for name, columns in (("own", batch), ("replayed", {**batch, **told})):
        start = time.perf_counter()
        found[name] = away(engine.scores(columns), rows)
        found[name]["seconds"] = time.perf_counter() - start
        say(f"trainer in {dtype}, {name}: {found[name]}")
    some = {name: column[:8] for name, column in {**batch, **told}.items()}
    some |= {"advantages": torch.ones_like(some["responses"]).float(), "old_log_probs": torch.zeros_like(some["responses"]).float()}
    metrics = engine.update(some, rg.ClippedLoss(), guard=lambda metrics: False)
    found |= {name: metrics[f"moe/{name}"] for name in ("route_agreement", "routes_replayed")}
    say(f"trainer in {dtype}: {found['route_agreement']:.4f} of its choices are the engine's, {found['routes_replayed']:.4f} are known")
    engine.close()
    return found


class _Told:
    def __init__(self, routes: Any) -> None:
        self.routes = routes


def main() -> None:
    parser = command_line(__doc__, smoke="a few tokens of two layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    if given.smoke:
        given.layers, given.prompts, given.tokens = 2, 8, 8
    import torch

    cuda = torch.cuda.is_available()
    shape = SMALL if given.smoke or not cuda else LARGE
    with tempfile.TemporaryDirectory() as work:
        folder = f"{work}/model"
        made(Path(folder), shape, given.layers, "cuda" if cuda else "cpu")
        if cuda:
            torch.cuda.empty_cache()
        say(f"a random model of {given.layers} layers, {shape['experts']} experts of which {shape['chosen']} are chosen")
        first = texts([LENGTHS[row % len(LENGTHS)] for row in range(given.prompts // 2)], seed=1)
        prompts = [prompt for prompt in first for _ in range(2)]
        ways = (False, True, True, False)  # in turns, so that other work of the machine slows both
        runs = [sampled(folder, cuda, prompts, given.tokens, routes, f"{work}/sampled.pt") for routes in ways]
        of_way = {
            routes: [s for way, (times, _) in zip(ways, runs, strict=True) if way == routes for s in times] for routes in (False, True)
        }
        plain_s, seconds = statistics.median(of_way[False]), statistics.median(of_way[True])
        plain, rows = runs[0][1], runs[1][1]
        same = sum(one[1] == other[1] for one, other in zip(plain, rows, strict=True))
        say(f"sampled {len(rows)} x {given.tokens} tokens in {plain_s:.2f} s, with routes in {seconds:.2f} s; {same} responses are equal")
        found: dict[str, Any] = {
            "script": "benchmarks/speed/router_replay.py",
            "model": {**shape, "layers": given.layers},
            "tokens": len(rows) * given.tokens,
            "engine": {
                "dtype": "bfloat16",
                "seconds": plain_s,
                "seconds_with_routes": seconds,
                "each": of_way[False],
                "each_with_routes": of_way[True],
                "equal_responses": same,
                "responses": len(rows),
            },
        }
        for dtype in ("bfloat16", "float32"):
            found[dtype] = scored(folder, cuda, dtype, rows)
    write_measured(given.json, found)


if __name__ == "__main__":
    main()
