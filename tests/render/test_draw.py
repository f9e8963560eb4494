"""The SVG of a plan is well-formed, complete and safe for any name."""

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlgraph.analysis.words import clean
from rlgraph.plan.plan import Plan
from rlgraph.render.plan_layout import drawn_channels
from rlgraph.render.plan_picture import svg

SVG = "{http://www.w3.org/2000/svg}"


def tips(root: ElementTree.Element, kind: str) -> list[str]:
    return [group.findtext(f"{SVG}title", "") for group in root.iter(f"{SVG}g") if group.get("class") == kind]


def shown(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_picture_with_any_names_parses_and_has_each_node_channel_and_loop(
    random_plans: st.SearchStrategy[Plan], data: st.DataObject
) -> None:
    plan = data.draw(random_plans)
    root = ElementTree.fromstring(svg(plan))
    nodes, edges, loops = (tips(root, kind) for kind in ("node", "edge", "loop"))
    assert all(tip.startswith(f"{clean(node.name)}: ~") for tip, node in zip(nodes, plan.nodes, strict=True))
    assert Counter(tip.splitlines()[0] for tip in edges) == Counter(
        f"{clean(channel.writer)} → {clean(reader)}" for channel in drawn_channels(plan) for reader in channel.readers
    )
    assert len(loops) == sum(len(loop.readers) for loop in plan.loops)
    assert all(any(clean(loop.name) in tip for tip in loops) for loop in plan.loops)
    assert all(any(clean(channel.name) in tip for tip in (*edges, *nodes)) for channel in plan.channels)


@pytest.mark.parametrize(
    "name", ["<b>", "a & b", "\"quoted\" 'twice'", "Belohnung für 好", "tab\tand\nline", "\x00\x1b[31m", "]]>", "&amp;"]
)
def test_a_name_is_shown_as_it_is_and_never_as_markup(name: str, plans: dict[str, Plan]) -> None:
    root = ElementTree.fromstring(svg(replace(plans["one_step_off"], graph=name)))
    assert shown(root)[0] == clean(name)


def test_a_lane_shows_its_pool_its_devices_and_how_busy_it_is(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    words = shown(ElementTree.fromstring(svg(plan)))
    for expected in ("rollout", "2 GPUs", "train", "6 GPUs", "host"):
        assert expected in words
    words = shown(ElementTree.fromstring(svg(plans["ppo"])))
    assert all(f"busy {pool.busy:.0%}" in words for pool in plans["ppo"].pools)


def test_a_picture_shows_no_seconds_of_placeholder_costs_and_no_critical_cycle_of_them(plans: dict[str, Plan]) -> None:
    nominal, measured = (shown(ElementTree.fromstring(svg(plans[name]))) for name in ("one_step_off", "ppo"))
    assert not any(re.search(r"\d m?s$|busy|~|critical", line) for line in nominal)
    assert any("placeholder costs" in line for line in nominal)
    assert "9.00 s" in measured
    assert not any("placeholder" in line or "~" in line for line in measured)


def test_a_feedback_edge_is_dashed_and_says_its_bound_buffers_and_transport(plans: dict[str, Plan]) -> None:
    picture = svg(plans["k_step_off"])
    assert "weights: depth 2 (staleness at most 2), 2 buffers, peer" in shown(ElementTree.fromstring(picture))
    assert picture.count("stroke-dasharray") == 2  # the edge and its sign in the legend


def test_the_critical_cycle_is_drawn_in_red_and_nothing_else_is(plans: dict[str, Plan]) -> None:
    root = ElementTree.fromstring(svg(plans["ppo"]))
    red = "#c2330f"
    boxes = {
        group.findtext(f"{SVG}title", "").split(":")[0]: group.find(f"{SVG}rect")
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "node"
    }
    assert {name for name, box in boxes.items() if box is not None and box.get("stroke") == red} == {
        "policy.log_probs",
        "critic.values",
        "advantages",
        "policy.update",
        "critic.update",
    }
    edges = {
        group.findtext(f"{SVG}title", "").splitlines()[0]: group.get("stroke")
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "edge"
    }
    assert {name for name, stroke in edges.items() if stroke == red} == {"critic.values → advantages", "advantages → policy.update"}


def test_nodes_of_a_shared_pool_are_numbered_in_the_order_of_the_plan(plans: dict[str, Plan]) -> None:
    nodes = tips(ElementTree.fromstring(svg(plans["ppo"])), "node")
    order = {tip.split(":")[0]: match[1] for tip in nodes if (match := re.search(r"number (\d of \d) in the order of pool train", tip))}
    assert order == {"policy.log_probs": "1 of 4", "critic.values": "2 of 4", "policy.update": "3 of 4", "critic.update": "4 of 4"}


def test_a_picture_is_self_contained(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        assert not re.search(r"href|url\(|<script|@import", svg(plan))


def test_equal_plans_give_equal_pictures(plans: dict[str, Plan]) -> None:
    assert svg(plans["twenty"]) == svg(Plan.from_json(plans["twenty"].to_json()))
