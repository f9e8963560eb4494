"""The curves of a report: which metrics have one, evaluations and the user's own metrics included."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rlgraph.analysis import words
from rlgraph.analysis.run import Run
from rlgraph.render import curve

POINTS = 240  # of a curve; longer runs show means of several steps
REWARD = "critic/rewards/mean"

Steps = Sequence[Mapping[str, float]]  # the metrics of each
Chart = tuple[str, str, tuple[tuple[str, str], ...]]  # title, what its values are, and (name, metric) of each line
FAILURES = ("errors", "timeouts", "blocked", "template_errors", "malformed_calls", "failures")
LIMITS = ("tokens", "turns", "seconds", "cost")


def _of_conversations(prefix: str) -> tuple[Chart, ...]:
    """The charts of conversations with environments (`agent`) or with tools."""
    ends = (("median", "p50"), ("90th percentile", "p90"), ("most", "max"))
    return (
        ("Turns", "of a conversation", tuple((said, f"{prefix}/turns/{end}") for said, end in ends)),
        ("Seconds", "of a conversation", tuple((said, f"{prefix}/seconds/{end}") for said, end in ends)),
        ("Failures", "of conversations, a step", tuple((kind.replace("_", " "), f"{prefix}/{kind}") for kind in FAILURES)),
        ("Limits hit", "by conversations, a step", tuple((kind, f"{prefix}/limit_{kind}") for kind in LIMITS)),
    )


CHARTS: tuple[Chart, ...] = (
    ("Reward", "mean reward of a batch", (("reward", REWARD),)),
    ("Staleness", "versions behind, oldest and mean token", (("oldest", "staleness/max"), ("mean", "staleness/mean"))),
    ("Response length", "tokens", (("mean", "response_length/mean"), ("longest", "response_length/max"))),
    ("Loss", "policy loss", (("policy loss", "actor/pg_loss"),)),
    ("Imitation", "negative log-likelihood, nats a token", (("of the examples", "actor/nll"),)),
    ("Preferences", "share of pairs in the right order", (("policy", "preference/accuracy"), ("reward model", "reward/accuracy"))),
    ("Distillation", "divergence from the teacher, nats a token", (("divergence", "actor/distillation"),)),
    ("KL", "nats a token", (("policy has moved (ppo_kl)", "actor/ppo_kl"), ("to the reference", "actor/kl_loss"))),
    ("Engine and trainer", "KL of their log-probs, nats a token", (("k3", "rollout_corr/k3_kl"), ("k1", "rollout_corr/kl"))),
    ("Clipped", "share of tokens", (("clipped", "actor/pg_clipfrac"),)),
    ("Entropy", "nats a token", (("entropy", "actor/entropy"),)),
    ("Gradient", "norm before clipping", (("norm", "actor/grad_norm"),)),
    ("Value loss", "critic", (("value loss", "critic/vf_loss"),)),
    *(chart for prefix in ("agent", "tools") for chart in _of_conversations(prefix)),
    ("Seconds of a step", "s", (("step", "timing_s/step"), ("gen", "timing_s/gen"), ("update_actor", "timing_s/update_actor"))),
    ("Waiting", "s a step", (("wait_prev_gen", "timing_s/wait_prev_gen"), ("update_weights", "timing_s/update_weights"))),
)
# What evaluations measure: the ending of the metric that has its number of samples behind it, and what its values are.
EVALUATED = (("Held-out accuracy", "acc/mean@", "share of right answers"), ("Held-out reward", "reward/mean@", "mean reward"))
# The first part of the names of rlgraph's own metrics; others are the user's.
OURS = {
    "actor", "agent", "critic", "data", "dtype", "dynamic_sampling", "exact", "examples", "guards", "moe", "perf", "preference",
    "preferred", "prompt_length", "response", "response_length", "reward", "rollout_corr", "samples", "staleness", "step", "teachers",
    "timing_s", "timing_per_token_ms", "tools", "training", "val",
}  # fmt: skip
OWN = 40  # charts of the user's metrics, at most


def charts_of(steps: Steps) -> Iterator[Chart]:
    """Yield the charts of these steps' metrics: evaluations first, the user's own last."""
    yield from _evaluations(steps)
    yield from CHARTS
    yield from _own(steps)


def curves(run: Run) -> Iterator[str]:
    """Draw the curves of a run, and of the steps before its resume."""
    steps = run.all_steps
    size = max(-(-len(steps) // POINTS), 1)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    if size > 1:
        yield f"<p>Each point is the mean of {size} steps.</p>"
    if run.earlier:
        yield f"<p>The first {words.counted(len(run.earlier), 'step')} ran before the run went on from its checkpoint.</p>"
    yield '<div class="charts">'
    for chart in charts_of(steps):
        yield from _drawn(chart, groups if chart in CHARTS else _measured(chart, groups))
    yield "</div>"


def _measured(chart: Chart, groups: Sequence[Steps]) -> Sequence[Steps]:
    """Leave out the groups that lack a chart's metrics, so that the lines of an evaluation go on from one to the next."""
    metrics = [metric for _, metric in chart[2]]
    return [group for group in groups if any(math.isfinite(step.get(metric, math.nan)) for step in group for metric in metrics)]


def _drawn(chart: Chart, groups: Sequence[Steps]) -> Iterator[str]:
    title, unit, lines = chart
    series = {name: [_mean([step[metric] for step in group if metric in step]) for group in groups] for name, metric in lines}
    series = {name: values for name, values in series.items() if any(map(math.isfinite, values))}
    if series:
        yield f"<figure>{curve.svg(title, [group[0]['training/global_step'] for group in groups], series, unit)}</figure>"


def metric_names(steps: Steps) -> Sequence[str]:
    """List the names of all metrics, in the order in which they came."""
    return list(dict.fromkeys(name for step in steps for name in step))


def _evaluations(steps: Steps) -> Iterator[Chart]:
    """The charts of what evaluations measured; of rewards only where they are no accuracies."""
    found, version = metric_names(steps), of_version(steps)
    for title, ending, said in EVALUATED:
        names = [name for name in found if name.startswith("val/") and ending in name]
        right = [name.replace("reward/mean@", "acc/mean@") for name in names]
        if ending == "acc/mean@" or any(step.get(a) != step.get(b) for step in steps for a, b in zip(names, right, strict=True)):
            yield title, f"{said}{version}", tuple((name.removeprefix("val/"), name) for name in names)


def of_version(steps: Steps) -> str:
    """Say which version was evaluated last; nothing where none was."""
    versions = [step[name] for step in steps for name in step if name.startswith("val/") and name.endswith("/version")]
    return f"; the last is of version {versions[-1]:.0f}" if versions else ""


def _own(steps: Steps) -> Iterator[Chart]:
    """A chart of each metric that the user's own nodes, losses and environments give."""
    for name in [name for name in metric_names(steps) if name.partition("/")[0] not in OURS][:OWN]:
        yield name, "", ((name, name),)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
