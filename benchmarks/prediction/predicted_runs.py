"""Recorded updates of one and two GPUs as the present code predicts them: from one rank's seconds, and with nothing measured.

    python benchmarks/prediction/predicted_runs.py                # the table; runs nothing and needs no GPU
    python benchmarks/prediction/predicted_runs.py --json         # writes results/predicted_runs.json too, for docs/prediction.md

The measured side is what `parallel.py` and `large.py` recorded. "From one rank" is a prediction from the seconds of `dp1` in the same
file. "Without" is the same code that counts neither the shards that ranks gather, nor more operations for layers with experts.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.parallel import Run, predicted_of

RESULTS, FILE = Path(__file__).parents[1] / "results", "predicted_runs.json"
HEAD = ("update", "measured", "from one rank", "without", "nothing measured", "without")


@dataclass(frozen=True)
class PredictedRun:
    """A recorded update: its seconds and the predicted ones; `without` gathering and operations of experts they are the last two."""

    name: str
    spec: str
    ranks: int
    measured_s: float
    estimated_s: float
    from_one_rank_s: float | None
    estimated_without_s: float
    from_one_rank_without_s: float | None

    @property
    def error(self) -> float:
        return self.estimated_s / self.measured_s - 1

    @property
    def error_from_one_rank(self) -> float:
        return (self.from_one_rank_s or 0.0) / self.measured_s - 1

    @property
    def error_without_gathering(self) -> float:
        return (self.from_one_rank_without_s or 0.0) / self.measured_s - 1


def compared() -> Iterator[PredictedRun]:
    """Predict every run that `parallel.py` and `large.py` recorded."""
    for file in sorted([*RESULTS.glob("parallel_*.json"), *RESULTS.glob("experts_*.json")]):
        found = json.loads(file.read_text(encoding="utf-8"))
        size, one_rank = (found["sequences"], found["length"]), dict[Any, float]()
        tokens = found.get("pass_tokens", size[1])
        for spec, measured in found["runs"].items():
            run = Run.of(spec, passes=tokens)
            kind = run.shape, run.options
            one_rank_s = one_rank.get(kind) if measured["ranks"] > 1 else None
            yield _predicted(file.stem, spec, measured, run, (size, found["gpus"][0]), one_rank_s)
            if measured["ranks"] == 1:
                one_rank[kind] = measured["step_s"]
    for file in sorted(RESULTS.glob("large_*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        expert = found["expert"]
        way = {"tp": 1, "cp": 1, "dp": 2 // expert, "ep": expert}
        run = Run(found["shape"], way, ("offload",), passes=found.get("passes", 0))
        of = (tuple(found["size"]), found["machine"]["gpus"][0])
        spec = f"{run.shape}:{'dp' if expert == 1 else 'ep'}2:offload"
        yield _predicted(file.stem, spec, found["update"], run, of, None, moments=found["moments"])


def _predicted(
    file: str, spec: str, measured: Mapping[str, Any], run: Run, of: tuple[Any, str], one_rank_s: float | None, **optimizer: Any
) -> PredictedRun:
    import rlgraph as rg

    given = rg.AdamW(**optimizer) if optimizer else None

    def both() -> tuple[float, float | None]:
        alone = predicted_of(run, *of, None, given)["step_s"]
        return alone, None if one_rank_s is None else predicted_of(run, *of, one_rank_s, given)["step_s"]

    with ExitStack() as stack:
        for name, value in _without().items():
            stack.enter_context(patch(name, value))
        without = both()
    return PredictedRun(f"{spec}, {file}", spec, measured["ranks"], measured["step_s"], *both(), *without)


def _without() -> Mapping[str, Any]:
    from rlgraph.plan.estimates import HostTime

    def none(*given: Any, **more: Any) -> tuple[()]:
        return ()

    return {"rlgraph.plan.roofline.shards_of": none, "rlgraph.plan.estimates.EXPERTS_LAYER": HostTime(1.0, "as a dense layer")}


def rounded(runs: Iterable[PredictedRun]) -> list[dict[str, Any]]:
    """What the file of results holds of the runs: seconds to four digits."""
    return [{key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in vars(run).items()} for run in runs]


def tables() -> dict[str, str]:
    """Write the table by its name, as Markdown, of two ranks."""
    runs = [PredictedRun(**run) for run in json.loads((RESULTS / FILE).read_text(encoding="utf-8"))["runs"]]
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for run in runs:
        seconds = run.from_one_rank_s, run.from_one_rank_without_s, run.estimated_s, run.estimated_without_s
        cells = (run.name, f"{run.measured_s:.2f} s", *(seconds_with_error(each, run.measured_s) for each in seconds))
        if run.ranks == 2:
            lines.append(f"| {' | '.join(cells)} |")
    return {"predicted-runs": "\n".join(lines) + "\n"}


def seconds_with_error(seconds: float | None, measured_s: float, digits: int = 2) -> str:
    """Write predicted seconds with their error; nothing where there is no prediction."""
    return "" if seconds is None else f"{seconds:.{digits}f} s ({seconds / measured_s - 1:+.0%})".replace("-", "−").replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write the results")
    given, runs = parser.parse_args(), []
    for run in compared():
        runs.append(run)
        from_one = "" if run.from_one_rank_s is None else f", from one rank {run.from_one_rank_s:.2f} ({run.error_from_one_rank:+.0%})"
        print(f"{run.name:48} took {run.measured_s:5.2f} s, estimated {run.estimated_s:5.2f} ({run.error:+.0%}){from_one}", flush=True)
    if given.json:
        (RESULTS / FILE).write_text(json.dumps({"runs": rounded(runs)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
