"""`print(plan)` shows every fact of the plan, in lines of at most 100 cells."""

from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from rlgraph.analysis.words import clean, seconds
from rlgraph.plan.plan import Plan
from rlgraph.render.text import text


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_line_of_any_plan_is_wider_than_100_cells_or_ends_in_a_space(random_plans: st.SearchStrategy[Plan], data: st.DataObject) -> None:
    for line in text(data.draw(random_plans)).split("\n"):
        assert cell_len(line) <= 100
        assert line == line.rstrip()


def test_every_number_of_the_plan_is_there(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        shown = text(plan)
        for node in plan.nodes:
            row = next(line for line in shown.splitlines() if line.startswith(f"{node.name[:27]}") and f" {node.work} " in line)
            assert seconds(node.seconds, node.cost) in row
            assert str(node.rows) in row
        for pool in plan.pools:
            row = next(line for line in shown.splitlines() if line.startswith(f"{pool.name} ") and "%" in line)
            assert f"{pool.busy:.0%}" in row
        for loop in plan.loops:
            assert f"depth {loop.depth} (staleness at most {loop.depth})" in shown
            assert f"expected staleness {loop.staleness:.2f}" in shown
        assert f"predicted step {seconds(plan.prediction.period_s, plan.prediction.cost)}" in shown
        assert f"at most {plan.window} steps in flight".split()[2] in shown


def test_every_worker_channel_and_event_of_the_critical_cycle_is_there(plans: dict[str, Plan]) -> None:
    shown = " ".join(text(plans["ppo"]).split())
    assert "model2[0..2] 3 GPU 3-5 policy.log_probs, policy.update" in shown
    assert "policy.log_probs (local) local 2" in shown
    assert "reward shm 2 512 B kl_shaped_rewards: rewards" in shown
    assert "policy.update -> critic.update: order only" in shown
    assert " -> ".join(plans["ppo"].prediction.critical) in shown


def test_the_tables_are_aligned(plans: dict[str, Plan]) -> None:
    lines = text(plans["one_step_off"]).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("node "))
    column = lines[head].index("writes")
    rows = lines[head + 1 : head + 6]
    assert all(line[column - 2 : column].strip() == "" for line in rows if len(line) > column)
    assert rows[0][column:] == "prompt_texts, answer"


def test_times_say_whether_they_are_of_placeholder_costs(plans: dict[str, Plan]) -> None:
    assert "placeholder costs" in text(plans["one_step_off"])
    assert " measured " in text(plans["ppo"])
    assert "~" not in text(plans["ppo"])


def test_an_unsafe_certificate_is_not_called_safe(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    shown = text(replace(plan, certificate=replace(plan.certificate, deadlock_free=False)))
    assert "a deadlock is possible" in shown
    assert "no deadlock" not in shown


def test_a_publish_that_lengthens_the_step_says_so(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    (loop,) = plan.loops
    assert "lengthens the step" in text(replace(plan, loops=(replace(loop, hidden=False),)))
    assert "hidden behind other work" in text(replace(plan, loops=(replace(loop, hidden=True),)))


def test_plain_names_give_plain_ascii(plans: dict[str, Plan]) -> None:
    assert all(text(plan).isascii() for plan in plans.values())


def test_control_characters_of_a_name_do_not_reach_the_terminal(plans: dict[str, Plan]) -> None:
    assert clean("\x1b[31m") in text(replace(plans["single"], graph="\x1b[31m"))


def test_waits_are_listed_longest_first(plans: dict[str, Plan]) -> None:
    shown = " ".join(text(plans["ppo"]).split())
    waits = plans["ppo"].prediction.waits
    assert [wait.seconds for wait in waits] == sorted((wait.seconds for wait in waits), reverse=True)
    assert f"waits a step: {waits[0].who} {seconds(waits[0].seconds, 'measured')} for " in shown
