"""The line chart: its points are where they belong, gaps stay gaps, and any series can be drawn."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlgraph.render.charts import svg, ticks

SVG = "{http://www.w3.org/2000/svg}"
numbers = st.floats(-1e9, 1e9) | st.just(math.nan)


def series(picture: str) -> list[ElementTree.Element]:
    return [group for group in ElementTree.fromstring(picture).iter(f"{SVG}g") if group.get("class") == "series"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=200), st.text(max_size=30))
def test_any_two_series_are_drawn_inside_the_picture(values: list[tuple[float, float]], name: str) -> None:
    picture = svg(name, range(len(values)), {f"{name}1": [a for a, _ in values], f"{name}2": [b for _, b in values]}, name)
    root = ElementTree.fromstring(picture)
    width, height = map(float, str(root.get("viewBox")).split()[2:])
    assert len(series(picture)) == 2
    for group in series(picture):
        for path in group.iter(f"{SVG}path"):
            for x, y in re.findall(r"[ML](\S+) (\S+?)(?= |$)", str(path.get("d"))):
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height


def test_higher_values_are_drawn_higher_and_later_steps_further_right() -> None:
    (group,) = series(svg("t", [1, 2, 3], {"reward": [0.0, 2.0, 1.0]}, "y"))
    xs, ys = zip(*((float(c.get("cx", "")), float(c.get("cy", ""))) for c in group.iter(f"{SVG}circle")), strict=True)
    assert xs[0] < xs[1] < xs[2]
    assert ys[1] < ys[2] < ys[0]


def test_a_line_has_a_gap_where_a_value_is_missing() -> None:
    (group,) = series(svg("t", range(5), {"reward": [1.0, 2.0, math.nan, 3.0, 4.0]}, "y"))
    assert len(list(group.iter(f"{SVG}path"))) == 2


@given(st.lists(st.floats(-1e12, 1e12), max_size=20) | st.lists(st.integers(0, 10**6), max_size=20))
def test_ticks_enclose_all_values_and_are_few(values: list[float]) -> None:
    found = ticks(values, whole=all(isinstance(value, int) for value in values))
    assert 2 <= len(found) <= 8
    assert all(a < b for a, b in pairwise(found))
    room = 1e-6 * (found[-1] - found[0])
    assert all(found[0] - room <= value <= found[-1] + room for value in values)


def test_a_series_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="'reward' has 1 values for 2 positions"):
        svg("t", [0, 1], {"reward": [1.0]}, "y")
