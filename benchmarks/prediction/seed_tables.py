"""Published step times compared with what rlgraph predicts from the published stage times: sync, one-step-off, fully async, Async-RL.

    python benchmarks/prediction/seed_tables.py [--json PATH] [--markdown PATH]

Every row is a graph of the public API, compiled with the stage times of its table as costs. Nothing is fitted. What a row's
stage times do not explain is printed as such, in seconds and in words. Pure: no Ray, no GPU, less than a second.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import rlgraph as rg
from rlgraph.plan.cost_functions import NodeCost

MODEL = "Qwen/Qwen2.5-Math-7B"  # a name: compiling opens no file
RECIPE = "verl one-step-off, 7B, 16 H20"
FULLY_ASYNC = "verl fully async, 7B"
LARGEST_SYNC_ERROR = 0.08


@dataclass(frozen=True)
class Published:
    """A row of a published table, in seconds a step. `wait` is what the trainer waited for its batch; None: not given."""

    table: str
    row: str
    gpus: int
    step: float
    update: float
    old: float | None = None
    ref: float | None = None
    generate: float | None = None
    wait: float | None = None
    split: tuple[int, int] | None = None  # generator's GPUs and trainer's; None: one pool, time-shared

    @property
    def trained(self) -> float:
        return self.update + (self.old or 0.0) + (self.ref or 0.0)

    @property
    def generation(self) -> float:
        """Seconds of generation; where only the trainer's wait is given, what a generator takes that keeps it waiting so long."""
        return self.trained + (self.wait or 0.0) if self.generate is None else self.generate


ROWS = (
    Published(RECIPE, "sync, FSDP2", 16, 749, 286, 88, generate=321),
    Published(RECIPE, "one-step-off, FSDP2", 16, 520, 337, 108, generate=458, wait=45, split=(4, 12)),
    Published(RECIPE, "sync, Megatron", 16, 699, 344, 119, generate=207),
    Published(RECIPE, "one-step-off, Megatron", 16, 566, 347, 120, generate=501, wait=59, split=(4, 12)),
    Published(FULLY_ASYNC, "sync, 32 GPUs", 32, 790.10, 269.80, 107.71, generate=357.41),
    Published(FULLY_ASYNC, "async, 16 : 16 GPUs", 32, 294.77, 313.81, wait=21.26, split=(16, 16)),
    Published(FULLY_ASYNC, "sync, 64 GPUs", 64, 365.28, 133.41, 70.26, generate=150.72),
    Published(FULLY_ASYNC, "async, 32 : 32 GPUs", 64, 189.26, 156.98, wait=28.46, split=(32, 32)),
    Published(FULLY_ASYNC, "sync, 128 GPUs", 128, 356.30, 113.81, 53.92, generate=177.85),
    Published(FULLY_ASYNC, "async, 64 : 64 GPUs", 128, 150.63, 113.16, wait=33.14, split=(64, 64)),
    Published("verl fully async, 30B-A3B", "sync, 128 GPUs", 128, 497.89, 86.27, 28.73, 20.86, generate=348.05),
    Published("verl fully async, 30B-A3B", "async, 96 : 32 GPUs", 128, 282.75, 206.63, ref=50.05, wait=22.06, split=(96, 32)),
    Published("verl fully async, tools", "sync, 32 GPUs", 32, 375.47, 111.84, 35.19, generate=228.03),
    Published("verl fully async, tools", "async, 32 GPUs", 32, 221.36, 179.58, wait=40.59, split=(16, 16)),
)

WORDS: Mapping[str, str] = {
    f"{RECIPE}: sync, FSDP2": "no stage time is published for rewards, advantages, metrics and the driver's work between stages",
    f"{RECIPE}: sync, Megatron": "as for FSDP2",
    f"{RECIPE}: one-step-off, FSDP2": (
        "520 = 458 (generation, the slower side) + 32 (published waiting beyond what generation's own time asks for: the next "
        "generation starts only after the driver's work) + 30 (in no stage time: the blocking weight transfer and the driver). The "
        "synchronous row lacks 54 s of the same kind; put on both sides of this graph, they make 512"
    ),
    f"{RECIPE}: one-step-off, Megatron": (
        "566 = 501 (generation) + 25 (published waiting beyond it) + 40 (in no stage time); with the synchronous row's 29 s on both "
        "sides, 530"
    ),
    f"{FULLY_ASYNC}: sync, 32 GPUs": "in no stage time, as above",
    f"{FULLY_ASYNC}: sync, 64 GPUs": "in no stage time, as above",
    f"{FULLY_ASYNC}: sync, 128 GPUs": "in no stage time, as above",
    f"{FULLY_ASYNC}: async, 16 : 16 GPUs": (
        "the published update (313.81) is longer than the published step (294.77): the two cannot be means over the same steps, "
        "so no pipeline explains this row"
    ),
    f"{FULLY_ASYNC}: async, 32 : 32 GPUs": "3.8 s in no stage time: the weight transfer every fourth batch, the driver",
    f"{FULLY_ASYNC}: async, 64 : 64 GPUs": "4.3 s in no stage time, as above",
    "verl fully async, 30B-A3B: sync, 128 GPUs": "in no stage time, as above",
    "verl fully async, 30B-A3B: async, 96 : 32 GPUs": "4.0 s in no stage time; reference log-probs are on the trainer's way",
    "verl fully async, tools: sync, 32 GPUs": "explained",
    "verl fully async, tools: async, 32 GPUs": "1.2 s in no stage time (the split is not published; no matter, with stage times given)",
}


def matches(responses: list[str], answers: list[str]) -> list[float]:
    return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]


def graph(row: Published) -> rg.Graph:
    """Make the graph of a row: one pool on-policy, or two pools one step off, with the passes that the table has times for."""
    one = rg.Pool("shared")
    pools = (
        [one, one]
        if row.split is None
        else [rg.Pool(name, gpus=count) for name, count in zip(("rollout", "train"), row.split, strict=True)]
    )
    generator, policy, reference = rg.Generator(MODEL, pool=pools[0]), rg.Policy(MODEL, pool=pools[1]), rg.Reference(MODEL, pool=pools[1])
    weights = rg.feedback("weights", depth=0 if row.split is None else 1)
    prompts = rg.prompts([{"prompt": "2 + 2 =", "answer": "4"}] * 512, count=512)
    rollout = generator.rollout(prompts, weights, group_size=16)
    inputs = [rollout, rg.advantages(rollout, rg.reward(matches, prompts, rollout), estimator=rg.GRPO())]
    loss = rg.ClippedLoss()
    if row.old is not None:
        inputs.append(policy.log_probs(rollout))
    if row.ref is not None:
        inputs.append(reference.log_probs(rollout))
        loss = rg.ClippedLoss(kl_coef=0.001)
    step = policy.update(*inputs, loss=loss)
    weights.close(step.weights)
    return rg.Graph("published", step.metrics)


def predicted(row: Published, gap_s: float = 0.0) -> rg.Plan:
    """Compile the plan of a row; `gap_s` is taken on both sides, as a weight transfer that both wait for."""
    seconds = {"rollout": row.generation, "old_log_probs": row.old, "ref_log_probs": row.ref, "update": row.update}
    declared = graph(row)
    nodes = {node.name: seconds.get(node.name) or 0.0 for node in declared.nodes}
    return rg.compile(declared, rg.Cluster(gpus=row.gpus, cpus=8 * row.gpus), rg.planning.Costs(nodes, publish_s=gap_s, swap_s=gap_s))


@dataclass(frozen=True)
class Result:
    """A row with its prediction: seconds that the stage times explain, and those that they don't, by kind."""

    table: str
    row: str
    kind: str
    published_s: float
    predicted_s: float
    ratio: float  # published / predicted
    extra_wait_s: float | None  # the trainer's published wait beyond what the stage times ask for
    in_no_stage_s: float  # published step less all that the trainer is published to have done in it
    with_sync_gap_s: float | None  # predicted with the synchronous row's unexplained seconds on both sides
    critical: str
    why: str


def results() -> Iterator[Result]:
    """Yield every row with published stage times. The gap of a synchronous row is used for the asynchronous one after it."""
    gap_s = 0.0
    for row in ROWS:
        plan = predicted(row)
        step_s = plan.prediction.step_s
        sync = row.split is None
        if sync:
            gap_s = row.step - step_s
        own_s = row.trained + (row.generation if sync else row.wait or 0.0)
        asked_s = max(step_s - row.trained, 0.0)
        yield Result(
            table=row.table,
            row=row.row,
            kind="sync" if sync else "async",
            published_s=row.step,
            predicted_s=round(step_s, 2),
            ratio=round(row.step / step_s, 4),
            extra_wait_s=None if sync or row.generate is None else round((row.wait or 0.0) - asked_s, 2),
            in_no_stage_s=round(row.step - own_s, 2),
            with_sync_gap_s=round(predicted(row, gap_s).prediction.step_s, 2) if row.generate is not None and not sync else None,
            critical=" -> ".join(plan.prediction.critical),
            why=WORDS[f"{row.table}: {row.row}"],
        )


@dataclass(frozen=True)
class Needed:
    """A row of the Async-RL proposal, which gives totals only, and what its law needs for them.

    The formula: total = max(train + gather, generate + load, ref_logp). So each of the three lasts at most `async_s` and one lasts
    exactly `async_s`. With two sides that last equally long on half of the devices each, the synchronous total says how their time divides.
    """

    row: str
    sync_s: float
    async_s: float
    predicted_async_s: float
    predicted_sync_s: float | None
    divides: float | None  # the part of a side's time on all devices that more devices shorten, if the hybrid engine costs nothing
    overhead_s: float  # seconds of the synchronous step that no stage has, if all of a side's time divides
    why: str


TOTALS = (
    ("16", 500.0, 270.0, False),
    ("32", 260.0, 170.0, False),
    ("32 + async reference log-prob", 260.0, 140.0, True),
    ("32 + tuned TP config", 260.0, 115.0, True),
)


def proposal_graph(split: bool, own_reference: bool) -> rg.Graph:
    """List the proposal's tasks: train and logp on one half, generate on the other; ref_logp with train or by itself."""
    train = rg.Pool("train")
    rollout_pool = rg.Pool("rollout") if split else train
    generator, policy = rg.Generator(MODEL, pool=rollout_pool), rg.Policy(MODEL, pool=train)
    reference = rg.Reference(MODEL, pool=rg.Pool("reference") if own_reference and split else train)
    weights = rg.feedback("weights", depth=1 if split else 0, buffers=2 if split else 1)
    prompts = rg.prompts([{"prompt": "2 + 2 =", "answer": "4"}] * 512, count=512)
    rollout = generator.rollout(prompts, weights)
    advantages = rg.advantages(rollout, rg.reward(matches, prompts, rollout), estimator=rg.GRPO())
    inputs = (rollout, advantages, policy.log_probs(rollout), reference.log_probs(rollout))
    step = policy.update(*inputs, loss=rg.ClippedLoss(kl_coef=0.001))
    weights.close(step.weights)
    return rg.Graph("async_rl", step.metrics)


def needed() -> Iterator[Needed]:
    """Yield what stage times the law would need, checked by compiling the proposal's graph with them."""
    for name, sync_s, async_s, own_reference in TOTALS:
        parallel = async_s - sync_s / 2  # serial + parallel = sync / 2 on all devices, serial + 2 parallel = async on half of them
        possible = 0 <= parallel <= sync_s / 2
        side = NodeCost(serial_s=sync_s / 2 - parallel, parallel_s=16 * parallel) if possible else NodeCost(serial_s=async_s)
        plans = []
        for split in (True, False):
            declared = proposal_graph(split, own_reference)
            nodes = {node.name: side if node.name in ("rollout", "update") else 0.0 for node in declared.nodes}
            devices = 16 if not (own_reference and split) else 24  # thirds, of which two are the halves above
            plans.append(rg.compile(declared, rg.Cluster(gpus=devices, cpus=128), rg.planning.Costs(nodes)))
        yield Needed(
            row=name,
            sync_s=sync_s,
            async_s=async_s,
            predicted_async_s=round(plans[0].prediction.step_s, 2),
            predicted_sync_s=round(plans[1].prediction.step_s, 2) if possible else None,
            divides=round(parallel / (sync_s / 2), 3) if possible else None,
            overhead_s=sync_s - async_s,
            why=_law_words(sync_s, async_s, parallel, possible),
        )


def _law_words(sync_s: float, async_s: float, parallel: float, possible: bool) -> str:
    head = f"train + gather and generate + load last at most {async_s:g} s each, the slower of them exactly {async_s:g} s"
    if not possible:
        return (
            f"{head}; both together are {2 * async_s:g} s even if devices did not matter, so at least {sync_s - 2 * async_s:g} s of the "
            "synchronous step belong to no stage, or the tuned layout made the stages faster"
        )
    return (
        f"{head}; if both do and the hybrid engine costs nothing, {parallel / (sync_s / 2):.0%} of a side's time is shortened by twice the "
        f"devices; if all of it were, {sync_s - async_s:g} s of the synchronous step would be the hybrid engine's own"
    )


def markdown(rows: Sequence[Result], totals: Sequence[Needed]) -> str:
    """Write both tables as Markdown."""
    lines = ["| table | row | published | predicted | published / predicted | extra wait | in no stage time | what is not explained |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in rows:
        wait = "–" if r.extra_wait_s is None else f"{r.extra_wait_s:.1f}"
        lines.append(
            f"| {r.table} | {r.row} | {r.published_s:g} | {r.predicted_s:.1f} | {r.ratio:.3f} | {wait} | {r.in_no_stage_s:.1f} | {r.why} |"
        )
    lines += [
        "",
        "| setting | sync | async | predicted | divides | or overhead of sync | what the formula needs |",
        "|---|---|---|---|---|---|---|",
    ]
    for n in totals:
        divides = "–" if n.divides is None else f"{n.divides:.0%}"
        lines.append(f"| {n.row} | {n.sync_s:g} | {n.async_s:g} | {n.predicted_async_s:g} | {divides} | {n.overhead_s:g} s | {n.why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--markdown", type=Path, help="write the tables into this document, in place of those it has")
    arguments = parser.parse_args()
    rows, totals = list(results()), list(needed())
    print(f"{'table':31} {'row':24} {'published':>9} {'predicted':>9} {'ratio':>6} {'extra wait':>10} {'no stage':>8}")
    for r in rows:
        wait = "" if r.extra_wait_s is None else f"{r.extra_wait_s:.1f}"
        print(f"{r.table:31} {r.row:24} {r.published_s:9.1f} {r.predicted_s:9.1f} {r.ratio:6.3f} {wait:>10} {r.in_no_stage_s:8.1f}")
    for n in totals:
        print(f"Async-RL, {n.row}: sync {n.sync_s:g}, async {n.async_s:g}, predicted {n.predicted_async_s:g}: {n.why}")
    if arguments.json:
        found = {"rows": [asdict(r) for r in rows], "async_rl": [asdict(n) for n in totals]}
        arguments.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.markdown:
        before, _, rest = arguments.markdown.read_text(encoding="utf-8").partition("<!-- tables -->\n")
        after = rest.partition("<!-- end of tables -->")[2]
        text = f"{before}<!-- tables -->\n{markdown(rows, totals)}<!-- end of tables -->{after}"
        arguments.markdown.write_text(text, encoding="utf-8")
    worst = max(abs(r.published_s - r.predicted_s) / r.published_s for r in rows if r.kind == "sync")
    sys.exit(0 if worst <= LARGEST_SYNC_ERROR else f"a synchronous row is {worst:.1%} off, above {LARGEST_SYNC_ERROR:.0%}")


if __name__ == "__main__":
    main()
