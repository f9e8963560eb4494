"""The browser of samples: it filters, colours and shows turns, and no text of a policy becomes markup."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.browser import needs_browser, run_script
from support.sampled_runs import HOSTILE, sample, write
from support.simulated_run import simulate_run

from rlgraph.plan.plan import Plan
from rlgraph.render.report import as_script, page, shown_samples

DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
PROBE = """
const rows = () => [...document.querySelectorAll("#samples-list tbody tr")];
const field = (name) => document.querySelector(`#filters [name="${name}"]`);
const set = (name, value) => { field(name).value = value; field(name).dispatchEvent(new Event("input")); };
const filters = ["step-least", "step-most", "reward-least", "tokens-most", "version-least", "kind", "finish", "text"];
const clear = () => filters.forEach((name) => set(name, ""));
const cells = (place) => rows().map((row) => row.cells[place].textContent);
const found = { all: document.getElementById("found").textContent };
set("step-least", "2"); set("step-most", "2"); found.step = cells(0); clear();
set("reward-least", "1"); found.rewards = cells(2); clear();
set("tokens-most", "19"); found.tokens = cells(4); clear();
set("version-least", "2"); found.versions = cells(5); clear();
set("kind", "evaluation"); found.evaluated = cells(0); rows()[0].click();
found.heading = document.querySelector("#sample h3").textContent; clear();
set("kind", "training"); found.trained = rows().length; clear();
set("finish", "length"); found.finish = cells(6); clear();
set("text", "hostile"); found.text = rows().length; clear();
set("sort", "longest"); found.longest = cells(4)[0]; set("sort", "newest");
set("text", "the tool"); rows()[0].click();
const inTurn = (turn, part) => turn.querySelector(part).textContent;
found.turns = [...document.querySelectorAll(".turn")].map((turn) => [inTurn(turn, ".role"), inTurn(turn, ".said")]);
const tokens = () => [...document.querySelectorAll(".token")];
const colours = () => new Set(tokens().map((token) => getComputedStyle(token).backgroundColor)).size;
found.advantage = colours();
const colour = () => getComputedStyle(tokens()[0]).backgroundColor;
const colourOf = (order) => { clear(); set("sort", order); rows()[0].click(); return colour(); };
found.signs = [colourOf("best"), colourOf("worst")];
set("colour", "none"); found.signs.push(colour());
set("colour", "advantage"); set("sort", "newest"); set("text", "the tool"); rows()[0].click();
set("colour", "diff"); found.diff = colours();
set("colour", "none"); found.none = colours();
found.title = tokens()[0].title;
found.untrained = document.querySelectorAll(".token.untrained").length;
clear(); set("sort", "longest"); rows()[0].click();
found.hostile = document.querySelector(".turn.wrote .said").textContent;
found.images = document.querySelectorAll("img").length;
found.scripts = document.querySelectorAll("#sample script, #samples-list script").length;
found.others = document.querySelectorAll("#sample p.muted button").length;
const before = document.querySelector("#sample h3").textContent;
document.querySelector("#sample p.muted button").click();
found.moved = document.querySelector("#sample h3").textContent !== before;
set("sort", "oldest"); rows()[0].click();
found.shown = [...document.querySelectorAll(".images img")].map((image) => image.getAttribute("src"));
found.wide = document.documentElement.scrollWidth - innerWidth;
document.title = JSON.stringify(found);
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = [sample(step, row, tool=row == 1) for step in range(4) for row in range(8)]
    samples[-1] = sample(3, 7, response=f"hostile {HOSTILE}" * 3)
    samples[0]["images"] = [DOT, "javascript:alert(1)"]
    samples[8] |= {"kind": "evaluation", "rollout": "evaluate"}
    return write(tmp_path / "run", samples)


@needs_browser
def test_a_browser_filters_sorts_and_colours_samples_and_no_text_becomes_markup(
    plans: dict[str, Plan], folder: Path, tmp_path: Path
) -> None:
    found, console = run_script(PROBE, page(simulate_run(plans["one_step_off"], 12), folder), tmp_path)
    samples, _ = shown_samples(folder)
    assert console == ""
    assert found["all"] == "32 of 32 samples"
    assert found["shown"] == [DOT, None], "an image, and an address that is none"
    assert found["step"] == ["2"] * 8
    assert len(found["rewards"]) == sum(s["reward"] >= 1 for s in samples) > 0
    assert set(found["rewards"]) == {"1"}
    assert len(found["tokens"]) == sum(s["response_tokens"] <= 19 for s in samples) > 0
    assert len(found["versions"]) == sum(s["version_min"] >= 2 for s in samples) > 0
    assert len(found["finish"]) == sum(s["finish"] == "length" for s in samples) > 0
    assert (found["evaluated"], found["heading"], found["trained"]) == (["1"], "Step 1, row 0 of evaluate, an evaluation", 31)
    assert found["text"] == 1
    assert int(found["longest"]) == max(s["response_tokens"] for s in samples)
    assert [role.split(" · ")[0] for role, _ in found["turns"]] == ["system", "user", "policy, turn 1 of 2", "tool", "policy, turn 2 of 2"]
    assert found["turns"][4][0] == "policy, turn 2 of 2 · 2 tokens · reward 0.25"
    assert found["turns"][3][1] == "42 <b>rows</b>"
    assert found["turns"][4][1] == "The tool agrees."
    assert found["advantage"] == 1, "all tokens of a response have its advantage"
    assert len({*found["signs"]}) == 3, "of a good response, of a bad one, and without colours"
    assert found["diff"] > 5
    assert found["none"] == 1
    assert "advantage" in found["title"]
    assert found["untrained"] == 1
    assert found["hostile"] == f"hostile {HOSTILE}" * 3
    assert (found["images"], found["scripts"]) == (0, 0)
    assert (found["others"], found["moved"]) == (3, True)
    assert found["wide"] <= 0


def test_a_page_with_any_text_is_well_formed(plans: dict[str, Plan], folder: Path) -> None:
    root = ElementTree.fromstring(page(simulate_run(plans["one_step_off"], 12), folder))
    assert [found.get("id") for found in root.iter("section")][2] == "samples"
    assert len(list(root.iter("script"))) == 2


def test_json_in_a_script_has_no_character_that_ends_it() -> None:
    text = as_script({HOSTILE: HOSTILE})
    assert not set(text) & set("<>&\u2028\x00\x1b")


def test_of_many_samples_a_page_shows_places_spread_over_the_run(tmp_path: Path) -> None:
    write(tmp_path, [sample(step, row) for step in range(200) for row in range(8)])
    shown, whole = shown_samples(tmp_path, 1 << 18)
    steps = [s["step"] for s in shown]
    assert not whole
    assert steps == sorted(steps)
    assert (min(steps), max(steps)) == (0, 199)
    assert max(b - a for a, b in pairwise(steps)) < 30
    assert 20 < len(shown) < 400
    assert len({(s["step"], s["row"]) for s in shown}) == len(shown)
