"""The report of a run: one self-contained HTML file that needs no server and no network."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path, PurePath
from statistics import fmean
from urllib.parse import quote

from rlgraph.analysis import words
from rlgraph.analysis.attribution import BUSY, SMALL, Row, by_model
from rlgraph.analysis.findings import findings
from rlgraph.analysis.run import CardFacts, EventComparison, Run, compare_events, compare_waits
from rlgraph.analysis.samples import LINES, Sample, profile_files, read_file, sample_files
from rlgraph.analysis.samples import PROFILES_FOLDER as PROFILES
from rlgraph.plan.plan import Plan
from rlgraph.render import charts, plan_picture
from rlgraph.render.charts import REWARD, charts_of, curves, metric_names, of_version
from rlgraph.render.plan_labels import has_times
from rlgraph.render.text import mermaid, text
from rlgraph.render.timeline import last_steps, predicted_steps, timeline

# The browser of samples in a report: the data as JSON, from which no response can break out; the page's script draws it.

SHOWN_BYTES = 6 << 20  # of samples in a page
BLOCKS = 12  # places of a long run from which samples are shown

RANGES = (("step", "first", "last"), ("reward", "least", "most"), ("tokens", "least", "most"), ("version", "oldest", "newest"))
SORTS = {
    "newest": "newest step",
    "oldest": "oldest step",
    "best": "highest reward",
    "worst": "lowest reward",
    "longest": "longest",
    "shortest": "shortest",
    "off": "log-probs furthest apart",
}
COLOURS = {"advantage": "advantage", "diff": "difference of log-probs", "log_prob": "log-prob", "version": "version", "none": "nothing"}


def samples_section(folder: Path) -> Iterator[str]:
    """Yield the HTML of the browser of the samples in a run's folder."""
    shown, whole = shown_samples(folder)
    where = "All recorded ones are shown" if whole else "A selection from the whole run is shown"
    yield f"<p>Responses of the policy, from training and evaluation. {where}; the files are in <code>samples/</code>.</p>"
    yield f'<div id="filters">{"".join(_controls())}</div>'
    yield '<p id="found" class="muted"></p><div id="samples-list"></div><div id="sample"></div>'
    yield f'<script type="application/json" id="sample-data">{as_script(shown)}</script>'


def _controls() -> Iterator[str]:
    for name, least, most in RANGES:
        fields = (
            f'<input name="{name}-{end}" type="number" step="any" placeholder="{said}"/>'
            for end, said in (("least", least), ("most", most))
        )
        yield f"<label>{name} <span>{' to '.join(fields)}</span></label>"
    yield _select("kind", "kind", {"": "all", "training": "training", "evaluation": "evaluation"})
    yield _select("ended by", "finish", {"": "any reason"})
    yield '<label>text <input name="text" type="search" placeholder="in prompt or response"/></label>'
    yield _select("sort by", "sort", SORTS)
    yield _select("colour tokens by", "colour", COLOURS)


def _select(label: str, name: str, choices: Mapping[str, str]) -> str:
    options = "".join(f'<option value="{value}">{said}</option>' for value, said in choices.items())
    return f'<label>{label} <select name="{name}">{options}</select></label>'


def as_script(value: object) -> str:
    """Write a value as JSON for a script element: no text in it can end the element, begin markup, or break the XML.

    >>> as_script("</script>&é")
    '"\\\\u003c/script\\\\u003e\\\\u0026\\\\u00e9"'
    """
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.replace("\x7f", "\\u007f")


def shown_samples(folder: Path, most_bytes: int = SHOWN_BYTES) -> tuple[list[Sample], bool]:
    """Choose the samples that a page shows: all, or blocks evenly spread over the files. Also returns whether they are all."""
    files = sample_files(folder)
    sizes = [path.stat().st_size for path in files]
    if sum(sizes) <= most_bytes:
        return [sample for path in files for sample in read_file(path)], True
    budget = most_bytes // BLOCKS
    found: dict[tuple[int, str, int], Sample] = {}
    for block in range(BLOCKS):
        place = (sum(sizes) - budget) * block // (BLOCKS - 1)
        for path, size in zip(files, sizes, strict=True):
            if place < size:
                for sample in _block(path, place, size, budget):
                    found[sample["step"], sample["rollout"], sample["row"]] = sample
                break
            place -= size
    return [found[key] for key in sorted(found)], False


def _block(path: Path, place: int, size: int, budget: int) -> Sequence[Sample]:
    """Read about `budget` bytes of a file from `place` on, but at least one sample."""
    if path.suffix != LINES:
        samples = list(read_file(path))
        share = max(len(samples) * budget // size, 1)
        first = min(len(samples) * place // size, len(samples) - share)
        return samples[first : first + share]
    found: list[Sample] = []
    with path.open("rb") as lines:
        lines.seek(place)
        if place:
            lines.readline()
        for line in lines:
            if (found and lines.tell() - place > budget) or not line.endswith(b"\n"):
                break
            found.append(json.loads(line))
    return found


FILE = "run.html"
SCRIPTS = ("report.js", "samples.js", "start.js")
SHOWN_STEPS = 6  # of the timeline
COLUMNS = (7, 4, 2)  # of tiles, on pages of three widths
LEAST = 0.005  # of a pool's time: smaller rows are added up
LEGEND = (
    ("generate", "generate"),
    ("train", "train"),
    ("forward", "forward pass"),
    ("host", "host node"),
    ("moving", "weights moving"),
    ("sleep", "engine wakes or sleeps"),
    ("carry", "copies and checks"),
    ("tools", "wait for tools"),
    ("data", "wait for data"),
    ("weights", "wait for a version"),
    ("room", "wait for a free slot"),
    ("order", "wait for its turn in the pool"),
    ("idle", "idle"),
)


def write(path: str | Path, run: Run, folder: str | Path | None = None) -> None:
    """Write the report of a run as one HTML file, with the samples of the run's folder if that is given."""
    Path(path).write_text(page(run, folder), encoding="utf-8")


def page(run: Run, folder: str | Path | None = None, *, state: str = "", scripts: Sequence[str] = SCRIPTS) -> str:
    """Build the report as one HTML document with its style and scripts. `state` shows whether the run continues."""
    title = escape(words.clean(run.plan.graph))
    drawn = list(sections(run, folder))
    steps = words.with_count(len(run.steps), "step") + (f' · <span id="state">{escape(state)}</span>' if state else "")
    body = [
        *heading(title, f"{escape(words.cluster(run.plan.cluster))} · {steps}", [(key, name) for key, name, _ in drawn]),
        tiles_of(run),
        *(f'<section id="{key}"><h2>{name}</h2>{content}</section>' for key, name, content in drawn),
    ]
    return document(title, body, scripts)


def sections(run: Run, folder: str | Path | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield the sections of a run's report: key, title and content. Samples and profiles come from the run's folder."""
    place = Path(folder) if folder is not None and sample_files(folder) else None
    recorded = (("samples", "Samples", lambda run: samples_section(place)),) if place is not None else ()
    profiles = profile_files(folder) if folder is not None else []
    profiled = (("profiles", "Profiles", lambda run: _profiles(profiles)),) if profiles else ()
    drawn: Sequence[tuple[str, str, Callable[[Run], Iterator[str]]]] = (
        ("advice", "What to change", _advice),
        ("graph", "Graph", _graph),
        *recorded,
        ("timeline", "Timeline", _timeline),
        ("bubbles", "Where the time went", _bubbles),
        *profiled,
        ("curves", "Curves", curves),
        ("predicted", "Predicted against measured", _prediction_section),
        ("certificate", "Certificate", _certificate),
        ("settings", "Settings", _settings),
    )
    for key, name, parts in drawn:
        yield key, name, "".join(parts(run))


def tiles_of(run: Run) -> str:
    """Lay out the tiles of a run: its most important numbers."""
    return lay_out_tiles(list(_tiles(run)))


def heading(title: str, said: str, linked: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the head of a report, with links to its sections: (key, title) each."""
    yield f"<header><h1>{title}</h1><p>{said}</p>"
    yield '<button id="theme" type="button">light / dark</button></header>'
    links = (f'<a href="#{key}">{name}</a>' for key, name in linked)
    yield f"<nav>{''.join(links)}</nav>"


def document(title: str, body: Sequence[str], scripts: Sequence[str] = SCRIPTS) -> str:
    """Make one HTML document of a report's parts, with its style and its scripts."""
    style, *parts = (files("rlgraph.render").joinpath(name).read_text(encoding="utf-8") for name in ("report.css", *scripts))
    end = "<footer>Made by rlgraph. This file is self-contained.</footer>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/><link rel="icon" href="data:,"/>'
        f"\n<style>\n{style}</style></head>\n"
        f"<body><main>\n{chr(10).join([*body, end])}\n</main>\n<script>\n//<![CDATA[\n{''.join(parts)}//]]>\n</script></body></html>\n"
    )


def lay_out_tiles(tiles: Sequence[str]) -> str:
    """Lay out the tiles; for each page width, choose the columns that fill rows equally.

    The first tile is as wide as the gap that the last row would leave.
    """
    layout = []
    for most in COLUMNS:
        columns = math.ceil(len(tiles) / math.ceil(len(tiles) / most))
        layout.append(f"--of-{most}:{columns};--first-of-{most}:{1 + -len(tiles) % columns}")
    return f'<div class="tiles" style="{";".join(layout)}">{"".join(tiles)}</div>'


def _tiles(run: Run) -> Iterator[str]:
    seconds = sorted(run.values("timing_s/step"))
    if seconds:
        least, most = (seconds[round(part * (len(seconds) - 1))] for part in (0.1, 0.9))
        yield _tile("step time", words.seconds(run.step_s), f"median; 80% from {words.seconds(least)} to {words.seconds(most)}")
    if run.priced is not None:
        simulated = run.priced.prediction.step_s
        yield _tile("simulated step", words.seconds(simulated), f"from measured node times; {_off(simulated, run.step_s)}")
    rewards = [step[REWARD] for step in run.earlier if math.isfinite(step.get(REWARD, math.nan))] + run.values(REWARD)
    if rewards:
        part = max(len(rewards) // 10, 1)
        first, last = fmean(rewards[:part]), fmean(rewards[-part:])
        yield _tile("reward", f"{last:.3f}", f"mean of the last {words.with_count(part, 'step')}; {first:.3f} at the start")
    held_out = next((name for name in metric_names(run.all_steps) if name.startswith("val/") and "acc/mean@" in name), None)
    if held_out is not None:
        values = [step[held_out] for step in run.all_steps if held_out in step]
        said = f"{escape(held_out.removeprefix('val/'))}, {values[0]:.3f} at first{of_version(run.all_steps)}"
        yield _tile("held out", f"{values[-1]:.3f}", said)
    worst = max((step.get("staleness/max", 0.0) for step in run.steps), default=0.0)
    yield _tile("staleness", f"{worst:.0f}", f"highest seen; the bound is {run.plan.certificate.staleness_bound}")
    for pool in run.plan.pools:
        if run.bubbles.of_pool(pool.name):
            busy = run.steady_bubbles.busy(pool.name)
            planned = f"; predicted {pool.busy:.0%}" if has_times(run.plan) else ""
            yield _tile(f"{escape(words.clean(pool.name))} busy", f"{busy:.0%}", f"{words.devices(pool)}{planned}")
    yield _tile("start-up", words.seconds(-run.start_s), "from launch to first step")


def _tile(name: str, value: str, note: str) -> str:
    return f'<div class="tile"><div>{name}</div><strong>{value}</strong><small>{note}</small></div>'


def _off(predicted: float, measured: float) -> str:
    if not predicted:
        return ""
    return f"measured {abs(measured - predicted) / predicted:.1%} {'more' if measured > predicted else 'less'}"


def _advice(run: Run) -> Iterator[str]:
    lines = findings(run)
    yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else "<p>Too few steps for advice.</p>"
    planned = run.plan.prediction.advice
    if planned:
        yield f"<p>Advice before the run, from {words.costs(run.plan)}:</p>"
        yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in planned)}</ul>"


def _graph(run: Run) -> Iterator[str]:
    plan = run.priced or run.plan
    said = "measured" if run.priced is not None else f"from {words.costs(plan)}, since too few steps were measured"
    yield f"<p>Node times are {said}. The critical cycle, which sets the step time, is red.</p>"
    yield f'<div class="drawing">{plan_picture.svg(plan)}</div>'


def _timeline(run: Run) -> Iterator[str]:
    if not run.spans:
        yield "<p>No span was recorded.</p>"
        return
    last = max(span.step for span in run.spans)
    count = min(SHOWN_STEPS, max(last, 1))
    measured = last_steps([span for span in run.spans if span.kind != "start"], count)
    predicted = predicted_steps(run.priced or run.plan, last, count)
    source = "measured node times" if run.priced is not None else words.costs(run.plan)
    yield (
        f"<p>The last {words.with_count(count, 'step')}: simulated from {source}, and measured. "
        'Zoom with <button type="button" data-zoom="1.5">+</button> <button type="button" data-zoom="0.667">−</button> '
        "or Ctrl + wheel; hover over a block for details.</p>"
    )
    lanes = "".join(timeline([("simulated", predicted), ("measured", measured)], run.plan))
    key = "".join(f'<span><i class="{name}"></i>{said}</span>' for name, said in LEGEND if f'class="{name}"' in lanes)
    yield f'{lanes}<p class="legend">{key}</p>'


def _bubbles(run: Run) -> Iterator[str]:
    bubbles = run.steady_bubbles
    yield (
        f"<p>All device time from step {run.first_steady} on, {words.seconds(bubbles.end_s - bubbles.start_s)} per device; "
        f"{bubbles.residual:.2%} not explained.</p>"
    )
    works = {node.name: node.work for node in run.plan.nodes}
    for pool in dict.fromkeys(row.pool for row in bubbles.pools):
        rows = by_model(bubbles.of_pool(pool))
        total = sum(row.seconds for row in rows)
        if not total:
            continue
        name = words.HOST if pool is None else words.clean(pool)
        yield f'<h3>{escape(name)}: <span class="muted">busy {bubbles.busy(pool):.1%}</span></h3><div class="stack">'
        for row in sorted(rows, key=lambda r: (r.use not in BUSY, -r.seconds)):
            share = row.seconds / total
            tooltip = escape(f"{row}: {share:.1%}")
            yield f'<i class="{_use_class(row, works)}" style="width:{100 * share:.4f}%" title="{tooltip}"></i>'
        small = [row for row in rows if row.seconds < LEAST * total]
        shown = [
            (row.seconds, escape(words.clean(row.worker)), f'<i class="key {_use_class(row, works)}"></i>{escape(str(row))}')
            for row in rows[: len(rows) - len(small)]
        ]
        shown += [(sum(row.seconds for row in small), "", SMALL)] if small else []
        cells = [[f"{seconds:.2f}", f"{seconds / total:.1%}", *said] for seconds, *said in shown]
        cells.append([f"<b>{total:.2f}</b>", "<b>100.0%</b>", "", ""])
        yield f"</div>{_table(('>device-seconds', '>share', 'worker', 'used for'), cells)}"


def _use_class(row: Row, works: dict[str, str]) -> str:
    return works.get(row.name, "host") if row.use == "node" else row.use


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table of cells that are HTML; a column whose name begins with `>` has numbers."""
    marks = [' class="n"' if column.startswith(">") else "" for column in columns]

    def cells(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}{mark}>{cell}</{tag}>' for mark, cell in zip(marks, row, strict=True))}</tr>"

    head = cells("th", [column.removeprefix(">") for column in columns])
    return f"<table><thead>{head}</thead><tbody>{''.join(cells('td', row) for row in rows)}</tbody></table>"


def _prediction_section(run: Run) -> Iterator[str]:
    nominal = not has_times(run.plan)
    said = "The plan had placeholder costs, so it predicted no times" if nominal else f"Predicted at launch, from {words.costs(run.plan)}"
    yield f"<p>{said}.</p>"
    if run.priced is not None:
        yield (
            f"<p>Simulated from this run's node times, a step takes <b>{words.seconds(run.priced.prediction.step_s)}</b>. "
            f"It took <b>{words.seconds(run.step_s)}</b>: {_off(run.priced.prediction.step_s, run.step_s)}.</p>"
        )
    columns = ("event", ">measured (median)", ">10th to 90th percentile", ">count", ">predicted", ">measured / predicted")
    shown = len(columns) - 2 * nominal
    yield _table(columns[:shown], (_comparison_cells(row)[:shown] for row in compare_events(run)))
    for what in run.plan.prediction.left_out:
        yield f"<p>Not predicted: {escape(words.clean(what))}.</p>"
    for what in run.plan.prediction.assumed:
        yield f"<p>Assumed: {escape(words.clean(what))}.</p>"
    waits = [wait for wait in compare_waits(run) if max(wait.predicted_s, wait.measured_s) > LEAST * run.step_s]
    if waits:
        yield "<p>Waits per step. If a node waits for several inputs, the simulation counts the wait for the last of them.</p>"
        cells = (
            (
                escape(words.clean(wait.who)),
                escape(words.WAITS[wait.reason](words.clean(wait.on))),
                words.seconds(wait.predicted_s),
                words.seconds(wait.measured_s),
            )
            for wait in waits
        )
        yield _table(("waiting", "for", ">simulated", ">measured"), cells)


def _comparison_cells(row: EventComparison) -> tuple[str, ...]:
    ratio = f"{row.measured_s / row.predicted_s:.2f}" if row.predicted_s else "–"
    between = f"{words.seconds(row.p10_s)} to {words.seconds(row.p90_s)}"
    name, measured, predicted = escape(words.clean(row.name)), words.seconds(row.measured_s), words.seconds(row.predicted_s)
    return name, measured, between, str(row.count), predicted, ratio


def _certificate(run: Run) -> Iterator[str]:
    proof, plan = run.plan.certificate, run.plan
    worst = max((step.get("staleness/max", 0.0) for step in run.steps), default=0.0)
    size = f"at most {words.size(proof.buffered_bytes)}" if proof.buffered_bytes is not None else "not known before the run"
    slots = run.observed.channel_slots or {}
    rows = (
        ("staleness in weight versions", *_bound_row(proof.staleness_bound, int(worst))),
        ("deadlock", "none" if proof.deadlock_free else "possible", f"none in {words.with_count(len(run.steps), 'step')}", "held"),
        ("open batches", *_bound_row(proof.open_batches, run.observed.open_batches or None)),
        *((f"slots of '{channel.name}' in use", *_bound_row(channel.slots, slots.get(channel.name))) for channel in plan.channels),
        ("bytes buffered in channels", size, "", "enforced"),
        ("steps in flight", f"at most {plan.window}", "", "enforced"),
        *([("step time", words.seconds(proof.period_s, plan.prediction.cost), words.seconds(run.step_s), "")] if has_times(plan) else []),
        *_exact(run),
    )
    yield _table(("bound", "certified", "measured", ""), ([escape(cell) for cell in row] for row in rows))


def _exact(run: Run) -> Iterator[tuple[str, str, str, str]]:
    if run.plan.certificate.exact:
        tokens = sum(step.get("exact/tokens_checked", 0.0) for step in run.steps)
        yield "log-probs of rollout and trainer", "bit-identical", f"identical in {tokens:.0f} tokens", "held"


def _bound_row(limit: int, seen: int | None) -> tuple[str, str, str]:
    if seen is None:
        return f"at most {limit}", "not recorded", ""
    return f"at most {limit}", f"at most {seen}", "held" if seen <= limit else "BROKEN"


def _profiles(found: Sequence[tuple[Path, str]]) -> Iterator[str]:
    yield "<ul>"
    for path, said in found:
        yield f'<li><a href="{PROFILES}/{escape(quote(path.name))}">{escape(path.name)}</a>: {said}</li>'
    yield "</ul>"


def _settings(run: Run) -> Iterator[str]:
    for name, values in run.settings.items():
        yield f'<details open=""><summary>{escape(words.clean(name))}</summary><table><tbody>'
        for key, value in values.items():
            yield f"<tr><td>{escape(words.clean(key))}</td><td><code>{escape(words.clean(value))}</code></td></tr>"
        yield "</tbody></table></details>"
    yield f"<details><summary>the launched plan</summary><pre>{escape(text(run.plan))}</pre></details>"


# The report of several graphs that ran one after the other: one HTML file, with curves over all of their steps.

OWN_SECTIONS = ("samples", "profiles")  # sections that only a graph's own report has
JOINT_SCRIPTS = ("report.js", "start.js")


@dataclass(frozen=True)
class GraphReport:
    """A graph of a joint report: its progress, the source of its weights, the metrics of all its steps, and its run if it has one.

    `folder` holds its own report, next to the joint one.
    """

    name: str
    state: str
    steps: int
    starts_from: str
    folder: str
    lines: Sequence[Mapping[str, float]] = ()
    run: Run | None = None


def write_joint(path: str | Path, title: str, graphs: Sequence[GraphReport]) -> None:
    """Write the joint report of several graphs, in their order, as one HTML file."""
    Path(path).write_text(joint_page(title, graphs), encoding="utf-8")


def joint_page(title: str, graphs: Sequence[GraphReport]) -> str:
    """Build the joint report as one HTML document.

    >>> joint_page("school", [GraphReport("sft", "to come", 20, "its own folder", "sft")]).count("<section")
    2
    """
    done = [graph for graph in graphs if graph.run is not None]
    shown = escape(words.clean(title))
    said = f"{words.with_count(len(graphs), 'graph')} · {words.with_count(sum(len(graph.lines) for graph in graphs), 'step')}"
    linked = [("graphs", "Graphs"), ("curves", "Curves"), *((f"graph-{graph.folder}", escape(graph.name)) for graph in done)]
    body = [
        *heading(shown, said, linked),
        f'<section id="graphs"><h2>Graphs, one after the other</h2>{_graph_table(graphs)}</section>',
        f'<section id="curves"><h2>Curves</h2>{"".join(_joint_curves(graphs))}</section>',
        *(
            f'<section id="graph-{escape(graph.folder)}">{"".join(_graph_details(graph, graph.run))}</section>'
            for graph in done
            if graph.run
        ),
    ]
    return document(shown, body, JOINT_SCRIPTS)


def _graph_table(graphs: Sequence[GraphReport]) -> str:
    columns = ("graph", "state", ">steps", "starts from", ">predicted step", ">median step", ">total")
    return _table(columns, map(_graph_cells, graphs))


def _graph_cells(graph: GraphReport) -> tuple[str, ...]:
    predicted = words.seconds(graph.run.plan.prediction.step_s, graph.run.plan.prediction.cost) if graph.run else ""
    median = words.seconds(graph.run.step_s) if graph.run else ""
    whole = words.seconds(sum(line.get("timing_s/step", 0.0) for line in graph.lines)) if graph.lines else ""
    link = f'<a href="{quote(graph.folder)}/{FILE}">{escape(graph.name)}</a>' if graph.run else escape(graph.name)
    starts_from = escape(words.clean(graph.starts_from))
    return link, escape(graph.state), f"{len(graph.lines)} of {graph.steps}", starts_from, predicted, median, whole


def _joint_curves(graphs: Sequence[GraphReport]) -> Iterator[str]:
    """Draw each metric over the steps of all graphs, a line for each graph that has it."""
    steps = [(number, line) for number, graph in enumerate(graphs) for line in graph.lines]
    yield '<p>Step numbers continue from graph to graph.</p><div class="charts">'
    for title, unit, lines in charts_of([line for _, line in steps]):
        series: dict[str, list[float]] = {}
        for number, graph in enumerate(graphs):
            for name, metric in lines:
                values = [line.get(metric, math.nan) if of == number else math.nan for of, line in steps]
                if any(map(math.isfinite, values)):
                    series[f"{graph.name}: {name}"] = values
        if series:
            yield f"<figure>{charts.svg(title, list(range(len(steps))), series, unit)}</figure>"
    yield "</div>"


def _graph_details(graph: GraphReport, run: Run) -> Iterator[str]:
    yield f"<h2>{escape(words.clean(graph.name))}</h2>{tiles_of(run)}"
    for key, name, content in sections(run):
        if key not in OWN_SECTIONS:
            yield f"<details><summary>{name}</summary>{content}</details>"


# The model card of an export: where the model comes from, the graph that trained it, its settings and the figures of the run.

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
        f"`{_plain(_shorten(base))}`, trained by rlgraph (`rlgraph-dataflow`) for {step} steps of the graph "
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
        text = _plain(_shorten(str(value)))
        yield f"| {_plain(key)} | {text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'} |"


def _shorten(value: str) -> str:
    return value if HUB_ID.fullmatch(value) or "/" not in value or " " in value else PurePath(value).name


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())


def _number(values: Metrics, key: str) -> str:
    return f"{values[key]:.6g}" if key in values else ""
