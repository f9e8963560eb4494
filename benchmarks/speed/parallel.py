"""Ranks that share a pass, or experts: seconds of an update, MFU and memory by tensor, context and expert parallel, beside predictions.

    python benchmarks/speed/parallel.py SHAPE:WAY[:OPTION] … [--sequences 2] [--length 32768] [--pass-tokens N] [--profile] [--json PATH]
    python benchmarks/speed/parallel.py 8B:dp2 8B:tp2 8B:cp2 --json benchmarks/results/parallel_h200.json      # two GPUs
    python benchmarks/speed/parallel.py 30B-A3B-8:dp2 30B-A3B-8:ep2 --sequences 8 --length 4096 --json benchmarks/results/experts_h100.json
    python benchmarks/speed/parallel.py pair:dp2 pair:tp2 pair:cp2 pair-moe:dp2 pair-moe:ep2 --smoke           # its first seconds, on a CPU

A way says how the ranks share: `tp2` is two ranks that share matrices, `cp2` two that share a row, `tp2dp2` four ranks, `dp2` two with
passes of their own, `ep2` two that share the experts of a mixture and have passes of their own, `ep2dp2` four ranks of which pairs do.
They recompute activations, a part of them with the option `selective`, none with `eager`. `compiled`, `offload`
(moments on the host) and `megatron` (the trainer) are others.
With `ring` all ranks that share a row pass keys round, where else they exchange tokens for heads as far as these go:
`8B:cp2 8B:cp2:ring`. Predictions are then still those of the exchange.
FLOP a token are those of `timed_updates.row`. "predicted" is what `rg.compile` estimates of the model's shape and the GPU's roofline, with
nothing measured; "from one rank" is what it predicts of the seconds that `dp1` took before in the same call. Four updates are timed after
two of warm-up; each rank is a process with a GPU of its own.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.predicted_update import predicted
from benchmarks.lib.profiled_update import profiled_update
from benchmarks.lib.timed_updates import PEAK, SMOKE, WARM_UP, begin_rank, end_rank, made_engine, of_ranks, row, timed_updates

STEPS = 4 + WARM_UP
NAMES = {"compiled": "compiled", "offload": "offload"}  # of settings, and of the options that give them
OPTIONS = "megatron", "compiled", "eager", "selective", "offload", "ring"


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
    passes: int = 0  # tokens of a pass; 0 is one sequence

    @classmethod
    def of(cls, spec: str, *, profile: bool = False, passes: int = 0) -> "Run":
        shape, way, *options = spec.split(":")
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise SystemExit(f"'{spec}': there is no option {unknown[0]}; write some of {', '.join(OPTIONS)}")
        if "ring" in options and ("megatron" in options or ways(way)["cp"] == 1):
            raise SystemExit(f"'{spec}': the option ring is for ranks of FSDP2 that share a row: write cp2:ring, without megatron")
        return cls(shape, ways(way), tuple(options), profile, passes)

    @property
    def trainer(self) -> str:
        return "megatron" if "megatron" in self.options else "fsdp"

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `rg.Policy`."""
        given: dict[str, Any] = {
            "recompute": "selective" if "selective" in self.options else "eager" not in self.options,
            "compiled": True,
            "offload": "moments",
        }
        return {name: value for name, value in given.items() if name == "recompute" or NAMES[name] in self.options}


def rank_process(run: Run, size: tuple[int, int], rank: int, world: int, rendezvous: str, results: Any) -> None:
    device = begin_rank(rank)
    sharing = {"tensor_parallel": run.way["tp"], "micro_batch_tokens": (run.passes or size[1]) // run.way["cp"]}
    sharing |= {f"{kind}_parallel": run.way[short] for kind, short in (("context", "cp"), ("expert", "ep")) if run.way[short] > 1}
    sharing |= {"ring": run.way["cp"]} if "ring" in run.options else {}
    engine = made_engine(run.shape, rank, world, rendezvous, device, fused=True, trainer=run.trainer, **sharing, **run.settings)
    seconds = timed_updates(engine, size, STEPS)
    if run.profile:
        profiled_update(engine, size, rank, seconds[WARM_UP:])
    end_rank(seconds, rank, world, results)


def predicted_of(run: Run, size: tuple[int, int], gpu: str, one_rank_s: float | None = None, optimizer: Any = None) -> dict[str, float]:
    """What a plan says of the update; see `predicted_update`."""
    settings = {**run.settings, "trainer": run.trainer} | ({"optimizer": optimizer} if optimizer else {})
    return predicted(run.shape, size, gpu, run.way, (run.passes or size[1]) // run.way["cp"], settings, one_rank_s)


def measure(run: Run, size: tuple[int, int], peak: float, gpu: str, one_rank_s: float | None) -> dict[str, Any]:
    world = ranks_of(run.way)
    found = row(run.shape, size, world, peak, of_ranks(world, rank_process, (run, size), 900 if run.profile else 400))
    found["predicted"] = predicted_of(run, size, gpu)
    if one_rank_s is not None and world > 1:
        found["predicted_from_one_rank_s"] = predicted_of(run, size, gpu, one_rank_s)["step_s"]
    return found


def main() -> None:
    parser = command_line(__doc__, smoke="two short sequences, on a CPU")
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--pass-tokens", type=int, default=0, help="of all ranks that share a pass; without it, a sequence")
    parser.add_argument("--peak", type=float, default=PEAK)
    parser.add_argument("--profile", action="store_true", help="one more update, profiled by rank 0")
    given = parser.parse_args()
    if given.smoke and given.json:
        parser.error("--smoke measures nothing: leave out --json")
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    size = SMOKE if given.smoke else (given.sequences, given.length)
    found: dict[str, Any] = {
        "peak_flop_per_s": given.peak,
        "sequences": size[0],
        "length": size[1],
        "pass_tokens": given.pass_tokens or size[1],
        "runs": {},
    }
    failed, alone = False, dict[tuple[str, tuple[str, ...]], float]()
    for spec in given.specs:
        try:
            asked = Run.of(spec, profile=given.profile, passes=given.pass_tokens)
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
        write_measured(given.json, found)
    sys.exit(failed)


if __name__ == "__main__":
    main()
