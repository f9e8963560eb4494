"""The model card of an export: where the model comes from, the graph that trained it, its settings and the figures of the run."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from rlgraph.analysis.run import CardFacts
from rlgraph.plan.plan import Plan
from rlgraph.render.mermaid import mermaid

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FIGURES = ("critic/rewards/", "val", "actor/", "critic/vf", "response", "staleness/", "rollout", "perf/total_num_tokens", "guards/")
LONGEST = 100  # characters of a setting
Metrics = Mapping[str, float]


def model_card(plan: Plan, facts: CardFacts) -> str:
    """Write the card as Markdown with the front matter that hubs read. Folders of this machine appear by their last name only."""
    base, step, first, last = facts.base, facts.step, facts.first, facts.last
    hub = HUB_ID.fullmatch(base) is not None
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    lines += [f"base_model: {base}"] if hub else []
    lines += ["tags:", "- reinforcement-learning", "- rlgraph", "---", "", f"# {_plain(plan.graph)}: {facts.model} after {step} steps", ""]
    lines += [
        f"`{_plain(_shortened(base))}`, trained by rlgraph (`rlgraph-dataflow`) for {step} steps of the graph "
        f"below. The weights are {facts.dtype}."
    ]
    lines += ["", "## Graph", "", "```mermaid", mermaid(plan).rstrip(), "```"]
    figures = [key for key in sorted({*first, *last}) if key.startswith(FIGURES)]
    if figures:
        lines += ["", "## Figures", "", f"| | first step | step {step} |", "|---|---|---|"]
        lines += [f"| {_plain(key)} | {_number(first, key)} | {_number(last, key)} |" for key in figures]
    lines += ["", "## Settings", ""]
    for owner, values in facts.settings.items():
        lines += [f"### {_plain(owner)}", "", "| | |", "|---|---|", *_rows(values), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(values: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        text = _plain(_shortened(str(value)))
        yield f"| {_plain(key)} | {text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'} |"


def _shortened(value: str) -> str:
    return value if HUB_ID.fullmatch(value) or "/" not in value or " " in value else PurePath(value).name


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())


def _number(values: Metrics, key: str) -> str:
    return f"{values[key]:.6g}" if key in values else ""
