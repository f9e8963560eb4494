"""SIGKILL at random times: no prompt lost, doubled or reordered, the staleness bound kept, the final weights those of an undisturbed run.

    python benchmarks/reliability/kills.py here --kills 250 --json PATH    the whole run in one process, killed again and again
    python benchmarks/reliability/kills.py ray --kills 50 --json PATH      workers, driver and Ray's own processes, on Ray

A real tiny model is trained on the CPU, by GRPO, at depth 0, 1 and 2. When to kill and whom is drawn from `--seed`. Results are added
to those in the file, so that a long measurement can be made in parts. `--minutes` ends a part early.
"""

import argparse
import bisect
import functools
import hashlib
import json
import math
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import rlgraph as rg
from benchmarks.lib.command import write
from benchmarks.reliability.victims import MARK, VICTIMS, chosen, kill, processes
from rlgraph.columns import Column, Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.nodes.base import Context
from rlgraph.record import open_metrics
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

ITEMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)]
PROMPTS, GROUP, EVERY, SEED = 4, 4, 3, 3
STEPPING = 0.8  # share of the kills on Ray that wait for a step to be done first


def digest(tensors: Sequence[torch.Tensor]) -> float:
    """Make a number that two runs share only if every bit is the same."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(hashed.digest()[:6], "big"))


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedPolicy(rg.Policy):
    """A policy that puts into its metrics which prompts it was trained on, how long the responses were, and a digest of its weights."""

    def load(self, context: Context) -> Any:
        engine = super().load(context)
        update = engine.update

        def watched(batch: Columns, *arguments: Any, **options: Any) -> dict[str, float]:
            metrics: dict[str, float] = update(batch, *arguments, **options)
            prompts, mask, lengths = batch["prompts"], batch["prompt_mask"], batch["response_mask"].sum(-1)  # type: ignore[union-attr]
            seen = {f"prompt/{row}": digest([tokens[keep]]) for row, (tokens, keep) in enumerate(zip(prompts, mask, strict=True))}
            seen |= {f"length/{row}": float(length) for row, length in enumerate(lengths)}
            return {**metrics, **seen, "weights": digest(list(engine.weights().values()))}

        engine.update = watched
        return engine


def odd_tokens(notes: Path) -> Any:
    """Reward the share of odd tokens, which a random model can learn to write, and note the length of every response."""

    @rg.node(reads="responses response_mask", writes="rewards")
    def odd(batch: Columns) -> dict[str, Column]:
        responses, mask = batch["responses"], batch["response_mask"]
        lengths = mask.sum(-1)  # type: ignore[union-attr]
        with notes.open("a") as file:
            file.write("".join(f"{length}\n" for length in lengths.tolist()))
        return {"rewards": (((responses % 2 == 1) & mask).sum(-1) / lengths.clamp(min=1)).float()}  # type: ignore[operator]

    return odd


def graph(model: Path, depth: int, notes: Path) -> rg.Graph:
    sampling = rg.Sampling(max_tokens=16, stop_token_ids=tuple(range(1, 40)))  # about one token in seven ends a response
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    policy = WatchedPolicy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth)
    prompts = rg.prompts(ITEMS, count=PROMPTS, seed=SEED)
    rollout = generator.rollout(prompts, weights, group_size=GROUP)
    rewards = odd_tokens(notes)(rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("faults", step.metrics)


def plan_of(folder: Path, depth: int) -> rg.Plan:
    return rg.compile(graph(folder.parent / "model", depth, folder / "sampled"), rg.Cluster(cpus=2))


def expected_prompts(model: Path, steps: int) -> list[list[float]]:
    """Digest the prompts of each step, from the data and the seed alone: a permutation an epoch, one after another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    places = []
    for epoch in range(math.ceil(steps * PROMPTS / len(ITEMS))):
        places += torch.randperm(len(ITEMS), generator=torch.Generator().manual_seed(SEED * 1_000_003 + epoch)).tolist()
    tokens = [digest([torch.tensor(ids, dtype=torch.int64)]) for ids in tokenizer([item["prompt"] for item in ITEMS])["input_ids"]]
    rows = [tokens[place] for place in places for _ in range(GROUP)]
    return [rows[step * PROMPTS * GROUP : (step + 1) * PROMPTS * GROUP] for step in range(steps)]


def run_here(folder: Path, depth: int, steps: int, *, recover: bool = True) -> None:
    """Run (on) in this process; a killed one is run again with the same arguments. Metrics go to `metrics.jsonl` in the folder."""
    torch.set_num_threads(1)
    plan = plan_of(folder, depth)
    assert isinstance(plan.source, rg.Graph)
    checkpoints = Checkpoints(plan.source, plan, Recovery(folder / "checkpoints", EVERY, 2)) if recover else None
    with LocalJob(plan.source, plan, checkpoints) as job, open_metrics(folder / "metrics.jsonl", job.finished_steps) as lines:
        for step in job.steps(steps):
            lines.write(json.dumps({"step": step.index, "staleness": step.staleness, **step.metrics}) + "\n")
            lines.flush()


def run_on_ray(folder: Path, depth: int, steps: int) -> None:
    """Do the same on Ray, as a user's program would."""
    with plan_of(folder, depth).launch(checkpoint=folder / "checkpoints", every=EVERY, restarts=20, deadline_s=60) as job:
        for _ in rg.record(job, steps, folder):
            (folder / "beat.new").write_text(str(time.time()))
            (folder / "beat.new").replace(folder / "beat")  # at once, so that nobody reads an empty file


@dataclass
class Found:
    """The counts of one run, which are added up over runs."""

    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    steps: int = 0
    trained: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


def check(folder: Path, undisturbed: Path, depth: int, steps: int) -> Found:
    """Compare a run that was killed with the one that was not, and both with the data."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    wrong = []
    if [line["step"] for line in lines] != list(range(steps)):
        wrong.append(f"steps are {[line['step'] for line in lines]}")
    for line, prompts in zip(lines, expected_prompts(folder.parent / "model", steps), strict=False):
        if [line[f"prompt/{row}"] for row in range(PROMPTS * GROUP)] != prompts:
            wrong.append(f"step {line['step']} was trained on other prompts")
        if line["staleness"] != min(line["step"], depth):
            wrong.append(f"step {line['step']} was {line['staleness']} versions behind")
    kept = ("step", "staleness", "weights", "prompt/", "length/", "actor/pg_loss", "actor/grad_norm")
    for line, other in zip(lines, whole, strict=False):
        if any(line[name] != other[name] for name in other if name.startswith(kept)):
            wrong.append(f"step {line['step']} differs from the undisturbed run")
    trained = [int(line[f"length/{row}"]) for line in lines for row in range(PROMPTS * GROUP)]
    return Found(wrong=wrong, steps=len(lines), trained=trained, sampled=[int(n) for n in (folder / "sampled").read_text().split()])


def kill_here(folder: Path, depth: int, steps: int, draw: random.Random, budget: int) -> Counter[str]:
    """Run on and on in forked processes, each killed after a random time, until the run is done or the budget is used."""
    kills: Counter[str] = Counter()
    while True:
        child = os.fork()
        if child == 0:
            try:
                run_here(folder, depth, steps)
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 (the outer edge of a process)
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(3)
        patience_s = draw.uniform(0.2, 3.0) if kills.total() < budget else None
        ended = _wait(child, patience_s)
        if ended is None:
            if draw.random() < 0.4:  # else few would be hit while a checkpoint is written, which takes some milliseconds
                _until(lambda: any((folder / "checkpoints").glob(".part-*")), 5, pause_s=0.001)
                time.sleep(draw.uniform(0, 0.02))
            writing = any((folder / "checkpoints").glob(".part-*"))
            os.kill(child, signal.SIGKILL)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:  # it was done before the signal came
                return kills
            kills["while a checkpoint was written" if writing else "at another time"] += 1
        elif ended == 0:
            return kills
        else:
            raise RuntimeError(f"the run in {folder} ended with status {ended}")


def _wait(child: int, timeout_s: float | None) -> int | None:
    """Wait for a child's exit status; None if it is still there after the time."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], timeout_s)[0]:
            return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_on_ray(folder: Path, depth: int, steps: int, draw: random.Random, budget: int, found: Found, of: Sequence[str] = ()) -> None:
    """Run a program on Ray and kill random processes of it; a killed driver is started again, the others come back by themselves."""
    log = (folder / "log").open("a")
    command = [sys.executable, __file__, "drive", str(folder), str(depth), str(steps)]
    environment = os.environ | {MARK: str(folder)}
    driver: subprocess.Popen[bytes] | None = None
    while True:
        if driver is None:
            driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        patience_s = draw.uniform(0.5, 5.0) if found.kills.total() < budget else 600
        try:
            status = driver.wait(patience_s)
        except subprocess.TimeoutExpired:
            status = None
        if status == 0:
            break
        if status is not None:
            found.kills["(the driver gave up and was started again)"] += 1
            driver = None
            continue
        if found.kills.total() >= budget:
            found.wrong.append("the run hung")
            driver.kill()
            break
        if draw.random() < STEPPING:  # else most would hit a start
            _until(functools.partial(_went_on, driver, folder, _beat(folder)), 120)
            time.sleep(draw.uniform(0.0, 2.0))
        if driver.poll() is not None:
            continue
        there = chosen(processes(folder), draw, of)
        if there is None:
            continue
        name, victim = there
        before, killed_s = _beat(folder), time.time()
        kill(victim)
        found.kills[name] += 1
        if name == "driver":
            driver.wait()
            driver = None
            continue
        if _until(functools.partial(_went_on, driver, folder, before), 120) and driver.poll() is None:
            found.back_s.append(float(_beat(folder)) - killed_s)
    if not _until(lambda: not processes(folder), 60):  # helpers of a Ray whose driver was killed end by themselves, in half a minute
        found.wrong.append(f"processes were left: {processes(folder)}")


def _beat(folder: Path) -> str:
    return (folder / "beat").read_text() if (folder / "beat").exists() else ""


def _went_on(driver: "subprocess.Popen[bytes]", folder: Path, before: str) -> bool:
    return driver.poll() is not None or _beat(folder) != before


def _until(done: Callable[[], bool], timeout_s: float, pause_s: float = 0.1) -> bool:
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


def ks_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Compute the p-value of the two-sample Kolmogorov-Smirnov test, asymptotic (Smirnov, 1948)."""
    points = sorted({*a, *b})
    x, y = sorted(a), sorted(b)
    gap = max(abs(bisect.bisect_right(x, point) / len(x) - bisect.bisect_right(y, point) / len(y)) for point in points)
    scale = math.sqrt(len(x) * len(y) / (len(x) + len(y)))
    z = (scale + 0.12 + 0.11 / scale) * gap
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * z) ** 2) for k in range(1, 101))) if z > 0.2 else 1.0


def measure(mode: str, kills: int, seed: int, minutes: float, of: Sequence[str] = ()) -> dict[str, Any]:
    draw, end = random.Random(seed), time.monotonic() + 60 * minutes
    root = Path(tempfile.mkdtemp(prefix="rlgraph-faults-"))
    tiny_model(root / "model")
    steps, total, runs, equal = {"here": 24, "ray": 120}[mode], Found(), 0, Counter[str]()
    try:
        while total.kills.total() < kills and time.monotonic() < end:
            depth = runs % 3
            whole = root / f"whole-{depth}"
            if not whole.exists():
                whole.mkdir()
                child = os.fork()
                if child == 0:
                    run_here(whole, depth, steps, recover=False)
                    os._exit(0)
                assert _wait(child, None) == 0
            folder = root / f"run-{runs}"
            folder.mkdir()
            found = Found()
            budget = min(kills - total.kills.total(), 40)
            if mode == "ray":
                kill_on_ray(folder, depth, steps, draw, budget, found, of)
            else:
                found.kills = kill_here(folder, depth, steps, draw, budget)
            checked = check(folder, whole, depth, steps)
            _add(total, found, checked)
            equal[f"depth {depth}"] += not checked.wrong
            runs += 1
            print(f"run {runs}, depth {depth}: {dict(found.kills)}, {'; '.join(found.wrong + checked.wrong) or 'all is right'}", flush=True)
            shutil.rmtree(folder) if not (found.wrong or checked.wrong) else None
    finally:
        if not total.wrong:
            shutil.rmtree(root, ignore_errors=True)
    return _summary(mode, seed, runs, total, equal)


def _add(total: Found, found: Found, checked: Found) -> None:
    total.kills, total.back_s = total.kills + found.kills, total.back_s + found.back_s
    total.wrong += found.wrong + checked.wrong
    total.steps += checked.steps
    total.trained, total.sampled = total.trained + checked.trained, total.sampled + checked.sampled


def _summary(mode: str, seed: int, runs: int, total: Found, equal: Counter[str]) -> dict[str, Any]:
    return {
        "mode": mode,
        "seed": seed,
        "runs": runs,
        "steps": total.steps,
        "kills": dict(total.kills),
        "kills in all": sum(count for name, count in total.kills.items() if not name.startswith("(")),
        "wrong": total.wrong,
        "runs that equal the undisturbed one in every bit": dict(equal),
        "responses sampled, those of lost work included": len(total.sampled),
        "responses trained": len(total.trained),
        "lengths, KS p": ks_p(total.trained, total.sampled) if total.trained else None,
        "seconds from kill to next step": _spread(total.back_s),
        "load average at the end": os.getloadavg(),
    }


def _spread(times: list[float]) -> dict[str, float]:
    if len(times) < 2:
        return {}
    return {"count": len(times), "median": statistics.median(times), "p90": statistics.quantiles(times, n=10)[-1], "max": max(times)}


def combined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the kills of all parts, by what was killed where."""
    kills = {mode: Counter[str]() for mode in ("here", "ray")}
    for part in parts:
        kills[part["mode"]].update(part["kills"])
    return {"kills": {mode: dict(found.most_common()) for mode, found in kills.items()}, "parts": list(parts)}


def main() -> None:
    if sys.argv[1:2] == ["drive"]:
        run_on_ray(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("mode", choices=["here", "ray"])
    arguments.add_argument("--kills", type=int, default=50)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--minutes", type=float, default=13.0)
    arguments.add_argument("--of", nargs="+", choices=VICTIMS, default=(), help="on Ray, kill only these")
    arguments.add_argument("--json", type=Path, help="add the figures to those in this file")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    figures = measure(given.mode, given.kills, given.seed, given.minutes, given.of)
    print(json.dumps(figures, indent=1))
    if given.json:
        before = json.loads(given.json.read_text())["parts"] if given.json.exists() else []
        write(given.json, combined([*before, figures]))
    sys.exit(bool(figures["wrong"]))


if __name__ == "__main__":
    main()
