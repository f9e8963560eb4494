"""What is set aside is passed over from its place on, and nothing else changes."""

import pytest

from rlgraph.nodes.prompts import Prompts

ITEMS = [{"prompt": f"item {i}"} for i in range(7)]


def drawn(set_aside: tuple[int, ...], steps: int, count: int = 3) -> list[int]:
    source = Prompts(ITEMS, count, 5, "prompt", ())
    return [position for step in range(steps) for position in source.positions(step, set_aside)]


def test_every_place_is_drawn_once_and_in_order() -> None:
    assert drawn((), 20) == list(range(60))


@pytest.mark.parametrize("aside", [(0,), (4,), (11,), (4, 12), (12, 4, 30), (6, 7)])
def test_an_item_that_was_set_aside_is_passed_over_from_there_on(aside: tuple[int, ...]) -> None:
    source = Prompts(ITEMS, 3, 5, "prompt", ())
    index = {position: source.item(position)["prompt"] for position in range(100)}
    gone = [p for p in range(100) if any(p >= first and index[p] == index[first] for first in aside)]
    assert drawn(aside, 20) == [p for p in range(100) if p not in gone][:60]


def test_steps_before_the_place_draw_what_they_drew() -> None:
    assert drawn((10,), 3) == list(range(9))
    assert 10 not in drawn((10,), 6)
