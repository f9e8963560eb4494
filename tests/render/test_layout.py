"""Nothing in a plan's picture lies on what it does not belong to, whatever the graph."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlgraph.plan.plan import Plan
from rlgraph.render.plan_labels import loop_label
from rlgraph.render.plan_layout import Box, Layout, Point, drawn_channels, layout

# A failing plan is shown as drawn: making it smaller takes minutes.
randomly = settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
Rect = tuple[float, float, float, float]  # left, top, right, bottom


def rect(box: Box) -> Rect:
    return box.x, box.y, box.right, box.bottom


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def traced(points: tuple[Point, ...], curved: bool) -> Iterator[Point]:
    """Yield points along a line as it is drawn: cubic curves between different heights, or straight lines."""
    for (x0, y0), (x1, y1) in pairwise(points):
        for i in range(33):
            t = i / 32
            if curved:
                middle = (x0 + x1) / 2
                x = (1 - t) ** 3 * x0 + 3 * (1 - t) ** 2 * t * middle + 3 * (1 - t) * t**2 * middle + t**3 * x1
                yield x, (1 - t) ** 2 * (1 + 2 * t) * y0 + t**2 * (3 - 2 * t) * y1
            else:
                yield x0 + t * (x1 - x0), y0 + t * (y1 - y0)


def lines(picture: Layout) -> list[list[Point]]:
    return [list(traced(e.points, True)) for e in picture.edges] + [list(traced(line.points, False)) for line in picture.loops]


def text_rects(picture: Layout) -> list[Rect]:
    texts = [*picture.texts, *(item.label for item in picture.legend)]
    return [(*text.span[:1], text.y - 0.75 * text.size, text.span[1], text.y + 0.22 * text.size) for text in texts]


def check(plan: Plan) -> None:
    picture = layout(plan)
    rects = [rect(box) for box in picture.boxes]
    for a, b in combinations(rects, 2):
        assert not overlap(a, b), (a, b)
    for a, b in combinations(picture.lanes, 2):
        assert a.y + a.height <= b.y
    texts = text_rects(picture)
    for a, b in combinations(texts, 2):
        assert not overlap(a, b), (a, b)
    for left, top, right, bottom in [*texts, *rects]:
        assert left >= 0
        assert right <= picture.width
        assert top >= 0
        assert bottom <= picture.height
    for points in lines(picture):
        for x, y in points:
            assert 0 <= x <= picture.width
            assert 0 <= y <= picture.height
            for left, top, right, bottom in rects:
                assert not (left + 0.01 < x < right - 0.01 and top + 0.01 < y < bottom - 0.01), (x, y, (left, top, right, bottom))
            for left, top, right, bottom in texts:
                assert not (left < x < right and top < y < bottom), (x, y, (left, top, right, bottom))


def test_nothing_overlaps_in_the_pictures_of_known_graphs(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        check(plan)


@randomly
@given(data=st.data())
def test_nothing_overlaps_in_the_pictures_of_random_graphs(random_plans: st.SearchStrategy[Plan], data: st.DataObject) -> None:
    check(data.draw(random_plans))


@randomly
@given(data=st.data())
def test_boxes_stand_in_the_lane_of_their_pool_and_their_texts_inside_them(
    random_plans: st.SearchStrategy[Plan], data: st.DataObject
) -> None:
    picture = layout(data.draw(random_plans))
    lanes = {lane.pool.name if lane.pool else None: lane for lane in picture.lanes}
    for box in picture.boxes:
        lane = lanes[box.node.pool]
        assert lane.y < box.y
        assert box.bottom < lane.y + lane.height
        assert box.x > lane.x
        assert box.right < lane.x + lane.width
    inside = [
        text
        for text in text_rects(picture)
        for box in picture.boxes
        if overlap(text, rect(box)) and not (box.x <= text[0] and text[2] <= box.right and box.y <= text[1] and text[3] <= box.bottom)
    ]
    assert not inside


@randomly
@given(data=st.data())
def test_every_channel_reader_and_feedback_edge_has_a_line_that_ends_at_its_box(
    random_plans: st.SearchStrategy[Plan], data: st.DataObject
) -> None:
    plan = data.draw(random_plans)
    picture = layout(plan)
    boxes = {box.node.name: box for box in picture.boxes}
    assert set(boxes) == {node.name for node in plan.nodes}
    drawn = [(edge.channel.name, edge.reader) for edge in picture.edges]
    assert sorted(drawn) == sorted((channel.name, reader) for channel in drawn_channels(plan) for reader in channel.readers)
    assert [(line.loop.name, line.reader) for line in picture.loops] == [(p.name, reader) for p in plan.loops for reader in p.readers]
    for edge in picture.edges:
        writer, reader = boxes[edge.channel.writer], boxes[edge.reader]
        assert edge.points[0][0] == writer.right
        assert writer.y < edge.points[0][1] < writer.bottom
        assert edge.points[-1][0] == reader.x
        assert reader.y < edge.points[-1][1] < reader.bottom
    for line in picture.loops:
        for (x, y), box in ((line.points[0], boxes[line.loop.writer]), (line.points[-1], boxes[line.reader])):
            assert box.x <= x <= box.right
            assert box.y <= y <= box.bottom


@randomly
@given(data=st.data())
def test_arrows_that_enter_one_box_keep_their_distance(random_plans: st.SearchStrategy[Plan], data: st.DataObject) -> None:
    plan = data.draw(random_plans)
    picture = layout(plan)
    ends = [edge.points[-1] for edge in picture.edges] + [line.points[-1] for line in picture.loops]
    for a, b in combinations(ends, 2):
        assert abs(a[0] - b[0]) + abs(a[1] - b[1]) >= 7.0


def test_feedback_edges_run_below_all_lanes_each_at_its_own_height(plans: dict[str, Plan]) -> None:
    picture = layout(plans["twenty"])
    bottom = max(lane.y + lane.height for lane in picture.lanes)
    heights = [max(y for _, y in line.points) for line in picture.loops]
    assert len(set(heights)) == 2
    assert min(heights) > bottom


def test_a_loop_label_gives_way_to_the_lines_of_loops_below_it(plans: dict[str, Plan]) -> None:
    (loop,) = plans["one_step_off"].loops
    centred = loop_label(loop, 0.0, 500.0, [], (0.0, 1000.0))
    moved = loop_label(loop, 0.0, 500.0, [480.0], (0.0, 1000.0))
    crowded = loop_label(loop, 0.0, 500.0, [float(x) for x in range(0, 1000, 100)], (0.0, 1000.0))
    assert (centred.x, moved.span[0] > 480.0, crowded.span[0] > 900.0) == (500.0, True, True)


def test_the_critical_cycle_of_a_pool_marks_its_boxes_and_their_order(plans: dict[str, Plan]) -> None:
    picture = layout(plans["ppo"])
    assert picture.critical.nodes == {"policy.log_probs", "critic.values", "advantages", "policy.update", "critic.update"}
    assert picture.critical.edges == {("critic.values", "advantages"), ("advantages", "policy.update")}
    assert {"policy.log_probs", "critic.values", "critic.update"} <= picture.critical.order
