"""The report of several graphs that ran one after the other: one HTML file, with curves over all of their steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from rlgraph.analysis import words
from rlgraph.analysis.run import Run
from rlgraph.render import charts
from rlgraph.render.charts import charts_of
from rlgraph.render.report import FILE, document, heading, sections, tiles_of

OWN = ("samples", "profiles")  # sections that a graph's own report alone has
SCRIPTS = ("report.js", "start.js")


@dataclass(frozen=True)
class GraphReport:
    """A graph of a joint report: how far it is, where its weights are from, the metrics of all its steps, and its run where it has one.

    `folder` is that of its own report, beside the joint one.
    """

    name: str
    state: str
    steps: int
    starts_from: str
    folder: str
    lines: Sequence[Mapping[str, float]] = ()
    run: Run | None = None


def write(path: str | Path, title: str, graphs: Sequence[GraphReport]) -> None:
    """Write the joint report of several graphs, in their order, as one HTML file."""
    Path(path).write_text(page(title, graphs), encoding="utf-8")


def page(title: str, graphs: Sequence[GraphReport]) -> str:
    """Build the joint report as one HTML document.

    >>> page("school", [GraphReport("sft", "to come", 20, "its own folder", "sft")]).count("<section")
    2
    """
    done = [graph for graph in graphs if graph.run is not None]
    shown = escape(words.clean(title))
    said = f"{words.with_count(len(graphs), 'graph')} · {words.with_count(sum(len(graph.lines) for graph in graphs), 'step')}"
    linked = [("graphs", "Graphs"), ("curves", "Curves"), *((f"graph-{graph.folder}", escape(graph.name)) for graph in done)]
    body = [
        *heading(shown, said, linked),
        f'<section id="graphs"><h2>Graphs, one after the other</h2>{"".join(_table(graphs))}</section>',
        f'<section id="curves"><h2>Curves</h2>{"".join(_curves(graphs))}</section>',
        *(f'<section id="graph-{escape(graph.folder)}">{"".join(_graph(graph, graph.run))}</section>' for graph in done if graph.run),
    ]
    return document(shown, body, SCRIPTS)


def _table(graphs: Sequence[GraphReport]) -> Iterator[str]:
    yield '<table><thead><tr><th>graph</th><th>state</th><th class="n">steps</th><th>starts from</th>'
    yield '<th class="n">a step, predicted</th><th class="n">a step, median</th><th class="n">all steps</th></tr></thead><tbody>'
    for graph in graphs:
        predicted = words.seconds(graph.run.plan.prediction.step_s, graph.run.plan.prediction.cost) if graph.run else ""
        median = words.seconds(graph.run.step_s) if graph.run else ""
        whole = words.seconds(sum(line.get("timing_s/step", 0.0) for line in graph.lines)) if graph.lines else ""
        link = f'<a href="{quote(graph.folder)}/{FILE}">{escape(graph.name)}</a>' if graph.run else escape(graph.name)
        yield f'<tr><td>{link}</td><td>{escape(graph.state)}</td><td class="n">{len(graph.lines)} of {graph.steps}</td>'
        yield f"<td>{escape(words.clean(graph.starts_from))}</td>"
        yield f'<td class="n">{predicted}</td><td class="n">{median}</td><td class="n">{whole}</td></tr>'
    yield "</tbody></table>"


def _curves(graphs: Sequence[GraphReport]) -> Iterator[str]:
    """Draw each metric over the steps of all graphs, a line for each graph that has it."""
    steps = [(number, line) for number, graph in enumerate(graphs) for line in graph.lines]
    yield '<p>Steps count on from graph to graph.</p><div class="charts">'
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


def _graph(graph: GraphReport, run: Run) -> Iterator[str]:
    yield f"<h2>{escape(words.clean(graph.name))}</h2>{tiles_of(run)}"
    for key, name, content in sections(run):
        if key not in OWN:
            yield f"<details><summary>{name}</summary>{content}</details>"
