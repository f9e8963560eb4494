"""A report is one well-formed file with every number of its run, and a browser draws all of it without a complaint."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.simulated_run import scale_times, simulate_run

from rlgraph.analysis import words
from rlgraph.analysis.run import Observed, Run, compare_events, compare_waits
from rlgraph.errors import DataError
from rlgraph.plan.plan import Plan
from rlgraph.render.report import page
from rlgraph.render.timeline import last_steps, predicted_steps, write_two_traces

SECTIONS = ("advice", "graph", "timeline", "bubbles", "curves", "predicted", "certificate", "settings")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def run(plans: dict[str, Plan]) -> Run:
    return simulate_run(plans["ppo"], 40, scale=1.1, priced=scale_times(plans["ppo"], 1.1), tail=5.0)


@pytest.fixture(scope="module")
def root(run: Run) -> ElementTree.Element:
    return ElementTree.fromstring(page(run))


def shown(element: ElementTree.Element | None) -> str:
    assert element is not None
    return " ".join("".join(element.itertext()).split())


def section(root: ElementTree.Element, key: str) -> ElementTree.Element:
    return next(found for found in root.iter("section") if found.get("id") == key)


def cells(element: ElementTree.Element) -> list[list[str]]:
    return [[shown(cell) for cell in row.iter("td")] for row in element.iter("tr")]


def test_a_report_is_well_formed_and_has_every_section(root: ElementTree.Element) -> None:
    assert tuple(found.get("id") for found in root.iter("section")) == SECTIONS
    assert all(len(shown(section(root, key))) > 40 for key in SECTIONS)


def test_a_report_is_self_contained(run: Run) -> None:
    text = page(run)
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert set(re.findall(r"https?://[^\s\"<]*", text)) == {"http://www.w3.org/2000/svg"}


def test_every_row_of_the_bubbles_is_shown_with_its_seconds_and_adds_up(run: Run, root: ElementTree.Element) -> None:
    text = shown(section(root, "bubbles"))
    assert "0.00% not explained" in text
    for pool in run.plan.pools:
        rows = run.steady_bubbles.of_pool(pool.name)
        assert f"{pool.name}: busy {run.steady_bubbles.busy(pool.name):.1%}" in text
        assert f"{sum(row.seconds for row in rows):.2f}" in text
        assert str(rows[0]) in text


def test_predicted_and_measured_seconds_of_every_event_are_shown(run: Run, root: ElementTree.Element) -> None:
    text = shown(section(root, "predicted"))
    rows = {row.name: row for row in compare_events(run)}
    assert {"step", "rollout", "policy.update", "critic.update", "publish weights"} <= set(rows)
    for row in rows.values():
        assert words.seconds(row.predicted_s) in text
        assert words.seconds(row.measured_s) in text
    assert rows["rollout"].measured_s == pytest.approx(1.1 * rows["rollout"].predicted_s, rel=0.05)
    assert run.priced is not None
    assert words.seconds(run.priced.prediction.step_s) in text


def test_the_certificate_stands_beside_what_was_seen(root: ElementTree.Element, run: Run, plans: dict[str, Plan]) -> None:
    assert ["staleness in weight versions", "at most 1", "at most 1", "held"] in cells(section(root, "certificate"))
    broken = Run(run.plan, ({**run.steps[-1], "staleness/max": 3.0},), run.spans, run.start_s, run.end_s, None, {})
    found = cells(section(ElementTree.fromstring(page(broken)), "certificate"))
    assert ["staleness in weight versions", "at most 1", "at most 3", "BROKEN"] in found


def test_each_bound_of_the_certificate_has_its_observed_maximum_beside_it(run: Run) -> None:
    seen = replace(run, observed=Observed(1, 2, {"rollout": 1}))
    found = cells(section(ElementTree.fromstring(page(seen)), "certificate"))
    assert ["open batches", "at most 2", "at most 2", "held"] in found
    slots = next(channel.slots for channel in run.plan.channels if channel.name == "rollout")
    assert ["slots of 'rollout' in use", f"at most {slots}", "at most 1", "held"] in found


def test_predicted_waits_stand_beside_the_measured_ones(plans: dict[str, Plan]) -> None:
    plan = plans["ppo"]
    told = simulate_run(plan, 200, priced=plan, jitter=0.0)  # long: at its ends a run waits otherwise
    found = list(compare_waits(told))
    assert {wait.who for wait in found} >= {"score", "reward"}
    for wait in found:
        assert wait.measured_s == pytest.approx(wait.predicted_s, rel=0.05, abs=0.05)
    assert words.seconds(found[0].predicted_s) in shown(section(ElementTree.fromstring(page(told)), "predicted"))


def test_the_timeline_has_a_block_for_each_firing_of_the_last_steps_predicted_and_measured(run: Run, root: ElementTree.Element) -> None:
    blocks = [block.get("title", "") for block in section(root, "timeline").iter("i") if block.get("title")]
    for step in range(35, 40):
        told = [title for title in blocks if title.startswith(f"policy.update, step {step}:")]
        assert len(told) == 2 * min(len(run.plan.node("policy.update").workers), 2)


def test_settings_and_names_are_shown_as_they_are_and_never_as_markup(root: ElementTree.Element) -> None:
    text = shown(section(root, "settings"))
    assert "node <odd> & name" in text
    assert "<1> & 'quoted'" in text


def test_each_metric_has_a_curve_and_a_missing_metric_has_none(run: Run, root: ElementTree.Element) -> None:
    titles = [shown(text) for svg in section(root, "curves").iter("{http://www.w3.org/2000/svg}svg") for text in list(svg)[1:2]]
    assert {"Reward", "Staleness", "Response length", "Loss", "KL", "Entropy"} <= set(titles)
    assert "Value loss" not in titles


def titles_of(run: Run) -> list[str]:
    root = ElementTree.fromstring(page(run))
    return [shown(text) for svg in section(root, "curves").iter("{http://www.w3.org/2000/svg}svg") for text in list(svg)[1:2]]


def with_metrics(steps: Sequence[Mapping[str, float]], every: int, **metrics: float) -> tuple[Mapping[str, float], ...]:
    named = {name.replace("__", "/").replace("_at_", "@"): value for name, value in metrics.items()}
    return tuple({**step, **(named if index % every == every - 1 else {})} for index, step in enumerate(steps))


def test_evaluations_of_any_name_and_metrics_of_ones_own_have_curves(run: Run) -> None:
    evaluated = with_metrics(run.steps, 10, val__acc__mean_at_4=0.5, val__hard__acc__mean_at_4=0.1, val__version=6.0, mine__speed=2.0)
    found = replace(run, steps=evaluated)
    assert {"Held-out accuracy", "mine/speed"} <= set(titles_of(found))
    assert "Held-out reward" not in titles_of(found)
    text = page(found)
    assert "share of correct answers; the last is of version 6" in text
    assert all(f"<title>{name}</title>" in text for name in ("acc/mean@4", "hard/acc/mean@4"))
    partial = replace(run, steps=with_metrics(evaluated, 10, val__reward__mean_at_4=0.7))
    assert {"Held-out accuracy", "Held-out reward"} <= set(titles_of(partial)), "rewards that are no accuracies"


def test_the_steps_before_a_resume_are_drawn_too(run: Run, tmp_path: Path) -> None:
    resumed = replace(run, steps=run.steps[20:], earlier=run.steps[:20])
    assert curves_of(page(resumed)) == curves_of(page(run))
    assert "The first 20 steps ran before" in page(resumed)
    resumed.save(tmp_path)
    assert curves_of(page(Run.load(tmp_path))) == curves_of(page(run))


def curves_of(text: str) -> list[str]:
    return re.findall(r"<figure>.*?</figure>", text, re.S)


def test_a_thousand_steps_make_a_readable_page_of_bounded_size(plans: dict[str, Plan]) -> None:
    text = page(simulate_run(plans["one_step_off"], 1000))
    assert "Each point is the mean of 5 steps." in text
    assert len(text) < 400_000


def test_a_run_of_one_step_has_a_report(plans: dict[str, Plan]) -> None:
    ElementTree.fromstring(page(simulate_run(plans["single"], 1)))
    text = page(simulate_run(plans["one_step_off"], 1))
    assert "Node times are from placeholder costs" in text


@pytest.mark.parametrize("name", ["twenty", "k_step_off", "tool_use", "sync_colocated", "ppo_cores"])
def test_any_plan_has_a_report(name: str, plans: dict[str, Plan]) -> None:
    ElementTree.fromstring(page(simulate_run(plans[name], 12)))


def test_a_recorded_run_gives_the_report_of_the_run_itself(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    assert page(Run.load(tmp_path)) == page(run)


def test_a_folder_without_a_run_and_a_truncated_run_are_errors(run: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no recorded run"):
        Run.load(tmp_path)
    run.save(tmp_path)
    (tmp_path / "run.json").write_bytes((tmp_path / "run.json").read_bytes()[:-100])
    with pytest.raises(DataError, match="not a recorded run"):
        Run.load(tmp_path)


def test_a_timeline_has_predicted_and_measured_as_two_groups_of_the_same_tracks(run: Run, tmp_path: Path) -> None:
    write_two_traces(tmp_path / "both.json", predicted_steps(run.plan, 39, 4).spans, last_steps(run.spans, 4).spans, run.plan)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert groups == {1: "ppo, predicted", 2: "ppo, measured"}
    tracks = [{e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid} for pid in groups]
    assert tracks[0] == tracks[1]
    for pid in groups:
        blocks = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert min(block["ts"] for block in blocks) == 0
        assert {block["args"]["step"] for block in blocks if block["name"].startswith("policy.update")} >= {36, 37, 38, 39}
    ids = [e["id"] for e in events if e["ph"] == "s"]
    assert len(ids) == len(set(ids))


PROBE = """
const seen = [];
const block = (e) => getComputedStyle(e).display !== "inline";
for (const e of document.querySelectorAll("h1,h2,h3,p,li,td,th,summary,button,.tile,.tile *,figure,nav")) {
  if (block(e) && e.scrollWidth > e.clientWidth + 1 && e.clientWidth) seen.push("clipped: " + e.textContent.slice(0, 60));
}
for (const svg of document.querySelectorAll("svg")) {
  const whole = svg.getBoundingClientRect();
  if (whole.width < 100 || whole.height < 60) seen.push("not drawn: " + svg.getAttribute("aria-label"));
  if (svg.closest(".drawing") && whole.width > svg.getAttribute("width")) seen.push("enlarged: " + svg.getAttribute("aria-label"));
  for (const text of svg.querySelectorAll("text")) {
    const at = text.getBoundingClientRect();
    if (at.left < whole.left - 1 || at.right > whole.right + 1) seen.push("outside: " + text.textContent);
  }
}
const rows = new Map();
for (const tile of document.querySelectorAll(".tile")) rows.set(tile.offsetTop, [...(rows.get(tile.offsetTop) ?? []), tile]);
const edge = (tile, side) => Math.round(tile.getBoundingClientRect()[side]);
const ends = [...rows.values()].map((row) => edge(row[0], "left") + " " + edge(row.at(-1), "right"));
if (new Set(ends).size !== 1) seen.push("rows of tiles from and to " + ends);
const most = Math.max(...[...rows.values()].map((row) => row.length));
if ([...rows.values()].some((row) => row.length < most - 1)) seen.push("rows of tiles are of different lengths");
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const card = getComputedStyle(document.querySelector("section")).backgroundColor;
for (const text of document.querySelectorAll("svg text, p, td, th, li, h2")) {
  const style = getComputedStyle(text);
  const colour = text.closest("svg") ? style.fill : style.color;
  if (text.textContent.length > 1 && contrast(colour, card) < 4) seen.push("faint: " + text.textContent.slice(0, 40) + " " + colour);
}
for (const i of document.querySelectorAll(".lane i, .stack i")) {
  const style = getComputedStyle(i);
  if (style.backgroundColor === "rgba(0, 0, 0, 0)" && style.backgroundImage === "none") seen.push("no colour: " + i.className);
}
const found = { seen, blocks: document.querySelectorAll(".lane i").length, card, wide: document.documentElement.scrollWidth - innerWidth };
found.before = document.querySelector(".scale").clientWidth;
document.querySelector('[data-zoom="1.5"]').click();
found.after = document.querySelector(".scale").clientWidth;
document.getElementById("theme").click();
found.other = getComputedStyle(document.querySelector("section")).backgroundColor;
document.title = JSON.stringify(found);
"""


def in_browser(text: str, folder: Path, width: int, dark: bool) -> tuple[dict[str, Any], str]:
    """Open the page in Chromium; give the findings of the probe and the lines of the browser's console."""
    assert CHROMIUM is not None
    file = folder / "report.html"
    file.write_text(text.replace("</body>", f"<script>\n{PROBE}\n</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},1400", "--dump-dom"]
    flags += [f"--user-data-dir={folder / 'profile'}", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    done = subprocess.run([CHROMIUM, *flags, file.as_uri()], capture_output=True, text=True, timeout=250, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title is not None
    return json.loads(unescape(title[1])), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize(
    ("plan", "width", "dark"),
    [("ppo", 1280, False), ("ppo", 1280, True), ("single", 1280, False), ("one_step_off", 1000, False), ("one_step_off", 500, False)],
)
def test_a_browser_draws_all_of_a_report_readably_and_its_console_stays_empty(
    plans: dict[str, Plan], tmp_path: Path, plan: str, width: int, dark: bool
) -> None:
    run = simulate_run(plans[plan], 40, scale=1.1, priced=scale_times(plans[plan], 1.1), tail=5.0)
    found, console = in_browser(page(run), tmp_path, width, dark)
    assert console == ""
    assert found["seen"] == []
    assert found["wide"] <= 0
    assert found["blocks"] > (10 if plan == "single" else 100)
    assert found["after"] == pytest.approx(1.5 * found["before"], rel=0.01)
    assert found["card"] == ("rgb(28, 32, 40)" if dark else "rgb(255, 255, 255)")
    assert found["other"] == ("rgb(255, 255, 255)" if dark else "rgb(28, 32, 40)")
