"""What compiler and runtime know of an operation is declared: `NodeTraits`, `ModelTraits`, and the methods of `Operation`."""

import ast
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from support import fakes, forked_workers  # noqa: F401 (adds its dispatch)

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Node, Operation, Output, declare
from rlgraph.graph.traits import ModelTraits, NodeTraits
from rlgraph.nodes.base import Context
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.sendable import check_sendable
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.worker.spec import worker_specs
from rlgraph.values.pool import Pool
from rlgraph.values.sampling import BatchAdmission

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for file in (ROOT / "rlgraph").rglob("*.py") if "engines" not in file.relative_to(ROOT).parts)
# What may be looked at by the name of an attribute: values that a user gave, of whatever kind, and other libraries.
LOOKED_AT = {
    *("value", "function", "inner", "loss", "estimator", "by", "data", "refill", "self.environment", "type(value)", "self.cls", "cls"),
    "setting",  # of a setting, whose fields are checked one by one
    *("made", "found"),  # fields(...) of our own values, one by one
    *("source", "self.source"),  # a stream of rows, by any library
    *("owner",),  # the object of an attribute that has a new name
    *("torch", "ray.exceptions", "library", "module", "MultiOutputNode", "actor", "self"),
}


def looked_at(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first argument of each getattr, hasattr and setattr."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr", "setattr"):
            yield call.lineno, ast.unparse(call.args[0])


def test_no_attribute_of_an_operation_node_stage_or_model_is_read_by_getattr() -> None:
    assert len(SOURCES) > 100
    found = [f"{file.name}:{line} {what}" for file in SOURCES for line, what in looked_at(file.read_text()) if what not in LOOKED_AT]
    assert not found, f"declare a trait in rlgraph/graph/traits.py, with a default, in place of {found}"


def test_the_lint_sees_what_it_forbids() -> None:
    assert list(looked_at("x = getattr(node.operation, 'by_group', hasattr(stage, 'state'))")) == [(1, "node.operation"), (1, "stage")]


@pytest.mark.parametrize("traits", [NodeTraits, ModelTraits])
def test_each_trait_has_a_default_and_a_sentence(traits: type) -> None:
    assert isinstance(traits(), traits)
    said = " ".join(base.__doc__ or "" for base in traits.__mro__)
    assert not [field.name for field in fields(traits) if f"`{field.name}`" not in said]


@dataclass(frozen=True)
class Everything(Operation):
    """A generator of a user's own with a value of its own for every trait."""

    seconds: float = 0.0

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(
            work="generate",
            by_group=True,
            whole="calls your own function",
            reorders=True,
            host_pool=TOOLS,
            dims={"T": 4},
            sampling=rg.Sampling(max_tokens=4, temperature=0.5),
            group_size=2,
            admission=BatchAdmission("keep", True, 1),
            one_turn=True,
            looks_ahead=True,
            draws_from=OTHER,
            epochs=2,
            scored=0.5,
            mini_batches=2,
            preferences="pairs",
            compares="Mine",
            given=(),
            trial=False,
        )

    def start(self, context: Context) -> Any:
        return fakes.Generate(self.seconds).start(context)

    def check(self, node: Node) -> None:
        CHECKED.append(node.name)

    def cursor(self, step: int) -> Mapping[str, Any]:
        return {"next": 2 * step}

    @property
    def prompt_characters(self) -> float:
        return 40.0


class Other(Operation):
    """A source that stands in no graph."""

    def start(self, context: Context) -> Any:
        raise AssertionError("never run")


TOOLS, OTHER = Pool("tools", cpus=2), Other()
CHECKED: list[str] = []


def everything() -> Graph:
    """The small training loop with that generator."""
    made = fakes.vector_loop(1)
    object.__setattr__(made.node("rollout"), "operation", Everything())
    return Graph("everything", *made.outputs)  # checked anew, as the operation is another one


def test_an_operation_with_every_trait_differs_from_the_defaults_in_each() -> None:
    traits, default = Everything().traits, NodeTraits()
    assert not [field.name for field in fields(NodeTraits) if getattr(traits, field.name) == getattr(default, field.name)]


def test_an_operation_with_every_trait_compiles_and_the_plan_knows_them() -> None:
    graph = everything()
    plan = compile_plan(graph, Cluster(cpus=4))
    assert TOOLS in graph.pools
    assert plan.node("rollout").work == "generate"
    assert any("continuous" in text or "join" in text for text in plan.prediction.left_out)
    rollout = next(spec for spec in worker_specs(graph, plan, "", b"", 1.0) if "rollout" in spec.worker.nodes)
    assert rollout.sequences == 4 * 2, "a batch of 4, and one that joins it"


def test_an_operation_with_every_trait_runs_and_its_cursor_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    def run(job: Job | LocalJob, steps: int) -> list[float]:
        with job:
            return [step.metrics["loss"] for step in job.steps(steps)]

    graph = everything()
    plan = rg.compile(graph, Cluster(cpus=4))
    whole = run(plan.run_here(), 4)
    assert CHECKED == ["rollout"]
    saved = Job(graph, plan, dispatch_name="forked", deadline_s=60.0, recovery=Recovery(tmp_path, 2, 2))
    assert run(saved, 2) == whole[:2]
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())["cursors"]["rollout"] == {"next": 4}
    assert run(LocalJob(graph, plan, Checkpoints(graph, plan, Recovery(tmp_path, 2, 2))), 4) == whole[2:]


class Half(Operation):
    """Its stage can save a state and not load one."""

    def start(self, context: Context) -> Any:
        class Saves:
            def __call__(self, step: int, columns: Columns) -> Columns:
                return {}

            def state(self) -> int:
                return 0

        return Saves()


class Nothing(Operation):
    """Gives no function."""

    def start(self, context: Context) -> Any:
        return None


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Half(), r"node 'mine' has a state\(\) .* no load_state"),
        (Nothing(), r"node 'mine': start\(context\) returned None; it must return a function"),
    ],
)
def test_a_stage_that_cannot_run_or_go_on_is_refused_before_the_first_step(operation: Operation, message: str) -> None:
    def mine(rollout: Output) -> Output:
        return rg.extend.declare("mine", operation, [rollout], reads=("values",), writes=("rewards",)).batch

    graph = fakes.vector_loop(1, middle=mine)
    job = LocalJob(graph, compile_plan(graph, Cluster(cpus=2)))
    with pytest.raises(GraphError, match=message):
        job.__enter__()


@dataclass(frozen=True)
class Locked(Operation):
    """Holds what stays in its process."""

    lock: Any

    def start(self, context: Context) -> Any:
        raise AssertionError("never run")


def test_an_unpicklable_operation_is_named_before_anything_starts() -> None:
    graph = fakes.vector_loop(
        1, middle=lambda rollout: declare("mine", Locked(threading.Lock()), [rollout], reads=("values",), writes=("rewards",)).batch
    )
    with pytest.raises(GraphError, match="node 'mine': operation 'Locked' cannot be sent to a worker: its 'lock' is a lock"):
        check_sendable(graph)


def test_declare_refuses_an_object_that_is_no_operation() -> None:
    with pytest.raises(GraphError, match=r"node 'mine' has operation=.*derive from rlgraph\.extend\.Operation"):
        rg.extend.declare("mine", lambda step, columns: columns, (), reads=(), writes=("rewards",), rows=1)  # type: ignore[arg-type]


def test_the_page_on_nodes_shows_what_runs(tmp_path: Path) -> None:
    """Its nodes run in the small training loop too, and the state is part of a checkpoint."""
    page: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "developers" / "nodes.md").read_text(), re.S):
        exec(code, page)
    assert page["plan"].node("judge").work == "forward"
    assert next(len(pool.gpus) for pool in page["plan"].pools if pool.name == "judge") == 1

    def middle(rollout: Output) -> Output:
        return page["centred"](page["Judge"]("probe", pool=Pool("judge")).scores(rollout))  # type: ignore[no-any-return]

    def run(recovery: Recovery | None, steps: int) -> list[dict[str, float]]:
        graph = fakes.vector_loop(1, middle=middle)
        plan = compile_plan(graph, Cluster(cpus=3))
        with LocalJob(graph, plan, Checkpoints(graph, plan, recovery) if recovery else None) as job:
            return [{name: step.metrics[name] for name in ("loss", "baseline/mean")} for step in job.steps(steps)]

    whole = run(None, 4)
    assert [step["baseline/mean"] for step in whole] == pytest.approx([0.05, 0.095, 0.1355, 0.17195])
    recovery = Recovery(tmp_path, 2, 2)
    assert run(recovery, 2) + run(recovery, 4) == whole
