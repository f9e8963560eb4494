"""Ranks that share a pass, or experts: seconds of an update, MFU and memory by tensor, context and expert parallel, beside predictions.

    python benchmarks/parallel.py SHAPE:WAY[:OPTION] … [--sequences 2] [--length 32768] [--peak 989e12] [--profile] [--json PATH]
    python benchmarks/parallel.py 8B:dp2 8B:tp2 8B:cp2 --json benchmarks/results/parallel_h200.json      # two GPUs
    python benchmarks/parallel.py 30B-A3B-8:dp2 30B-A3B-8:ep2 --sequences 8 --length 4096 --json benchmarks/results/experts_h100.json
    python benchmarks/parallel.py pair:dp2 pair:tp2 pair:cp2 pair-moe:dp2 pair-moe:ep2 --smoke           # its first seconds, on a CPU

A way says how the ranks share: `tp2` is two ranks that share matrices, `cp2` two that share a row, `tp2dp2` four ranks, `dp2` two with
passes of their own, `ep2` two that share the experts of a mixture and have passes of their own, `ep2dp2` four ranks of which pairs do.
They recompute activations, but for the option `eager`. `compiled`, `offload` (moments on the host) and `megatron` (the trainer) are others.
FLOP a token are those of `timed_updates.row`. "predicted" is what `rg.compile` estimates of the model's shape and the GPU's roofline, with
nothing measured; "from one rank" is what it predicts of the seconds that `dp1` took before in the same call. Four updates are timed after
two of warm-up; each rank is a process with a GPU of its own.
"""

import argparse
import json
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiled_update import profiled_update
from timed_updates import PEAK, SMOKE, WARM_UP, begin_rank, end_rank, made_engine, of_ranks, row, timed_updates

STEPS = 4 + WARM_UP
NAMES = {"compiled": "compiled", "offload": "offload"}  # of settings, and of the options that give them
OPTIONS = "megatron", "compiled", "eager", "offload"


def ways(text: str) -> dict[str, int]:
    """Read a way: the number of ranks of each kind.

    >>> ways("tp2dp2")
    {'tp': 2, 'cp': 1, 'dp': 2, 'ep': 1}
    """
    found = dict(re.findall(r"(tp|cp|dp|ep)(\d+)", text))
    if "".join(f"{kind}{count}" for kind, count in found.items()) != text:
        raise SystemExit(f"'{text}' is no way: write tp2, cp2, dp2, ep2 or several of them, as tp2dp2")
    return {kind: int(found.get(kind, 1)) for kind in ("tp", "cp", "dp", "ep")}


def ranks_of(way: dict[str, int]) -> int:
    return math.prod(way.values())


@dataclass(frozen=True)
class Run:
    """A model, how ranks share it, and how they train it, as a spec says it."""

    shape: str
    way: dict[str, int]
    options: tuple[str, ...]
    profile: bool = False

    @classmethod
    def of(cls, spec: str, *, profile: bool = False) -> "Run":
        shape, way, *options = spec.split(":")
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise SystemExit(f"'{spec}': there is no option {unknown[0]}; write some of {', '.join(OPTIONS)}")
        return cls(shape, ways(way), tuple(options), profile)

    @property
    def trainer(self) -> str:
        return "megatron" if "megatron" in self.options else "fsdp"

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `rg.Policy`."""
        given: dict[str, Any] = {"recompute": "eager" not in self.options, "compiled": True, "offload": "moments"}
        return {name: value for name, value in given.items() if name == "recompute" or NAMES[name] in self.options}


def rank_process(run: Run, size: tuple[int, int], rank: int, world: int, rendezvous: str, results: Any) -> None:
    device = begin_rank(rank)
    sharing = {"tensor_parallel": run.way["tp"], "micro_batch_tokens": size[1] // run.way["cp"]}
    sharing |= {f"{kind}_parallel": run.way[short] for kind, short in (("context", "cp"), ("expert", "ep")) if run.way[short] > 1}
    more = {"host_moments" if name == "offload" else name: bool(value) for name, value in run.settings.items()}
    engine = made_engine(run.shape, rank, world, rendezvous, device, fused=True, trainer=run.trainer, **sharing, **more)
    seconds = timed_updates(engine, size, STEPS)
    if run.profile:
        profiled_update(engine, size, rank, seconds[WARM_UP:])
    end_rank(seconds, rank, world, results)


def predicted(run: Run, size: tuple[int, int], gpu: str, one_rank_s: float | None = None, optimizer: Any = None) -> dict[str, float]:
    """What a plan says of the update: its seconds, and the bytes on a GPU and of moments on the host; with the seconds of one rank, as if
    these had been profiled."""
    from shapes import config

    import rlgraph as rg

    way, (sequences, length) = run.way, size
    world, prompt = ranks_of(way), length // 4
    with tempfile.TemporaryDirectory() as folder:
        config(run.shape).save_pretrained(folder)  # type: ignore[attr-defined]
        sampling = rg.Sampling(max_tokens=length + 1 - prompt, ignore_eos=True)
        generator = rg.Generator(folder, pool=rg.Pool("rollout", gpus=1), sampling=sampling, max_context=length + 1)
        policy = rg.Policy(
            folder,
            pool=rg.Pool("train", gpus=world),
            tensor_parallel=way["tp"],
            context_parallel=way["cp"],
            expert_parallel=way["ep"],
            micro_batch_tokens=length // way["cp"],
            trainer=run.trainer,
            optimizer=optimizer or rg.AdamW(),
            **run.settings,
        )
        weights = rg.feedback("weights", depth=1)
        prompts = rg.prompts([{"prompt": "x" * 3 * prompt}], count=sequences // 2)  # three characters count as a token
        rollout = generator.rollout(prompts, weights, group_size=2)
        rewards = rg.reward(constant, rollout)
        step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.RLOO()), loss=rg.ClippedLoss())
        weights.close(step.weights)
        cluster = rg.Cluster(gpus=world + 1, cpus=64, gpus_per_node=world + 1, gpu=gpu)
        costs = None if one_rank_s is None else profiled(one_rank_s, size)
        plan = rg.compile(rg.Graph("parallel", step.metrics), cluster, costs)
    need = next(need for need in plan.memory if need.pool == "train" and not need.loading)
    staged = sum(size for part, size in need.parts if part == "weights in staging")  # for generators, which are not here
    on_host = sum(size for host in plan.memory if host.pool is None for part, size in host.parts if part == "optimizer")
    return {"step_s": plan.node("update").seconds, "peak_bytes": need.peak_bytes - staged, "host_bytes": on_host}


def profiled(seconds: float, size: tuple[int, int]) -> Any:
    """Costs in which one rank has taken so long for the update."""
    import rlgraph as rg
    from rlgraph.costs.functions import NodeCost, Setting
    from rlgraph.costs.lengths import Lengths
    from rlgraph.costs.microbatch_count import Passes

    (sequences, length), prompt = size, size[1] // 4
    tokens = float(length + 1 - prompt)
    measured = Setting(rows=sequences, passes=Passes(length))
    update = NodeCost(token_s=seconds / (sequences * length), measured=measured)
    nodes: dict[str, Any] = {"prompts": 0.0, "rollout": 1.0, "reward": 0.0, "advantages": 0.0, "update": update}
    return rg.Costs(nodes, lengths=Lengths((0.0, 1.0), (tokens, tokens), float(prompt - 1)))


def constant(responses: list[str]) -> list[float]:
    return [1.0 for _ in responses]


def measure(run: Run, size: tuple[int, int], peak: float, gpu: str, one_rank_s: float | None) -> dict[str, Any]:
    world = ranks_of(run.way)
    found = row(run.shape, size, world, peak, of_ranks(world, rank_process, (run, size), 900 if run.profile else 400))
    found["predicted"] = predicted(run, size, gpu)
    if one_rank_s is not None and world > 1:
        found["predicted_from_one_rank_s"] = predicted(run, size, gpu, one_rank_s)["step_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--peak", type=float, default=PEAK)
    parser.add_argument("--smoke", action="store_true", help="two short sequences, on a CPU")
    parser.add_argument("--profile", action="store_true", help="one more update, profiled by rank 0")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.smoke and given.json:
        parser.error("--smoke measures nothing: leave out --json")
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    size = SMOKE if given.smoke else (given.sequences, given.length)
    found: dict[str, Any] = {"peak_flop_per_s": given.peak, "sequences": size[0], "length": size[1], "runs": {}}
    failed, alone = False, dict[tuple[str, tuple[str, ...]], float]()
    for spec in given.specs:
        try:
            asked = Run.of(spec, profile=given.profile)
            kind = asked.shape, asked.options
            run = found["runs"][spec] = measure(asked, size, given.peak, gpu, alone.get(kind))
            if run["ranks"] == 1:
                alone[kind] = run["step_s"]
        except Exception as error:  # noqa: BLE001 (one way that does not fit must not lose the others)
            print(f"{spec}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        print(
            f"{spec}: {run['step_s']:.2f} s (predicted {run['predicted']['step_s']:.2f}"
            + (f", {from_one:.2f} from one rank" if (from_one := run.get("predicted_from_one_rank_s")) else "")
            + f"), {run['tokens_per_s']:.0f} tokens/s, MFU "
            f"{run['mfu']:.1%}, {run['peak_bytes'] / 2**30:.0f} GiB (predicted {run['predicted']['peak_bytes'] / 2**30:.0f})",
            flush=True,
        )
        if given.json:
            from learning_runs import machine

            given.json.write_text(json.dumps(found | machine(), indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
