"""Checkpoints: a run that goes on from one repeats the run that was never stopped, and what is no whole checkpoint is refused."""

import hashlib
import io
import json
import pickle
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fakes
from torch.distributed.checkpoint import metadata

from rlgraph.channels.host.slot_memory import new_segment
from rlgraph.columns import Column, Columns
from rlgraph.engines.fsdp import distributed_checkpoint
from rlgraph.errors import CheckpointError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.nodes.base import Context
from rlgraph.plan.checkpoint_cut import lookaheads
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.checkpoint.worker_snapshot import describe_missing_folder
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step
from rlgraph.runtime.messages import CheckpointShard, Saved
from rlgraph.runtime.worker.spec import Saving
from rlgraph.values.pool import Pool

Bits = tuple[int, dict[str, float], int]


def job(graph: Graph, folder: Path | None, every: int = 3, **options: object) -> LocalJob:
    plan = compile_plan(graph, Cluster(cpus=2))
    recovery = Recovery(folder, every, **{"keep": 2, **options}) if folder else None  # type: ignore[arg-type]
    return LocalJob(graph, plan, Checkpoints(graph, plan, recovery) if recovery else None)


def run(graph: Graph, folder: Path | None, steps: int, every: int = 3, **options: object) -> list[Bits]:
    with job(graph, folder, every, **options) as running:
        return [bits(step) for step in running.steps(steps)]


def bits(step: Step) -> Bits:
    return step.index, {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}, step.staleness


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_resumed_run_repeats_the_run_that_was_never_stopped(depth: int, stop: int, tmp_path: Path) -> None:
    whole = run(fakes.vector_loop(depth), None, 10)
    first = run(fakes.vector_loop(depth), tmp_path, stop)
    assert first + run(fakes.vector_loop(depth), tmp_path, 10) == whole
    assert [staleness for *_, staleness in whole] == [min(step, depth) for step in range(10)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_may_be_resumed_at_every_step(depth: int, tmp_path: Path) -> None:
    found = [bit for stop in range(1, 9) for bit in run(fakes.vector_loop(depth), tmp_path, stop)]
    assert found == run(fakes.vector_loop(depth), None, 8)


@pytest.mark.parametrize("name", ["a/b", "../up", "..", "a\0b", "é" * 200])
def test_a_node_of_any_name_is_saved_inside_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    def graph() -> Graph:
        return fakes.vector_loop(1, middle=lambda rollout: fakes.score(rollout, name=name))

    new_segment(name, 1)[1].close()
    found = run(graph(), tmp_path / "saved", 3)
    assert len(list((tmp_path / "saved" / "step-00000003").iterdir())) == len(compile_plan(graph(), Cluster(cpus=2)).workers) + 4
    assert found + run(graph(), tmp_path / "saved", 6) == run(graph(), None, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_whose_process_died_goes_on_from_the_last_whole_checkpoint(depth: int, tmp_path: Path) -> None:
    whole = run(fakes.vector_loop(depth), None, 10)
    died = job(fakes.vector_loop(depth), tmp_path)
    died.__enter__()
    assert [bits(step) for step in died.steps(8)] == whole[:8]
    died.checkpoints.close()  # type: ignore[union-attr]
    assert run(fakes.vector_loop(depth), tmp_path, 10) == whole[6:]


def test_a_checkpoint_holds_no_step_that_its_owner_has_not_seen(tmp_path: Path) -> None:
    with job(fakes.vector_loop(1), tmp_path, every=2) as running:
        for step in running.steps(8):
            held = [int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*")]
            assert max(held, default=0) <= step.index  # the present step is seen when the next one is asked for


def test_shards_of_a_step_that_nobody_has_seen_wait(tmp_path: Path) -> None:
    graph = fakes.vector_loop(1)
    plan = compile_plan(graph, Cluster(cpus=2))
    held = Checkpoints(graph, plan, Recovery(tmp_path, every=2, keep=2))
    for worker in plan.workers:
        assert held.list_complete(handed=4) == []
        held.hear(Saved(4, CheckpointShard(worker.name, worker.nodes, rank=0, world=1, file="", written=())))
    assert (held.list_complete(handed=3), held.list_complete(handed=4)) == ([], [4])
    held.close()


def test_a_cut_has_the_rollout_ahead_by_its_depth_and_the_trained_model_not_at_all() -> None:
    found = lookaheads(compile_plan(fakes.vector_loop(2), Cluster(cpus=2)))
    assert found == {"prompts": 2, "generator": 2, "score": 2, "policy": 0}


def test_batches_open_at_a_checkpoint_use_no_version_made_after_it_and_others_any() -> None:
    saving = Saving("", "", every=4, lookahead=2, trained=False, open=())
    anything = float("inf")
    assert [saving.newest_version(step) for step in range(11)] == [*[anything] * 4, 4, 4, *[anything] * 2, 8, 8, anything]


@dataclass(frozen=True)
class Counting(Operation):
    """A node with a state: the number of its firings goes into the rewards."""

    def start(self, context: Context) -> "Counter":
        return Counter()


class Counter:
    def __init__(self) -> None:
        self.fired = 0

    def __call__(self, step: int, columns: Columns) -> tuple[dict[str, Column], dict[str, float]]:
        self.fired += 1
        return {"rewards": columns["values"].mean(-1) * 0.1 + self.fired}, {"fired": float(self.fired)}  # type: ignore[union-attr]

    def state(self) -> Mapping[str, Any]:
        return {"fired": self.fired, "seen": [torch.ones(2)]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.fired = state["fired"]


def counted(*inputs: Output) -> Output:
    return Output(declare("counting", Counting(), inputs, reads=("values",), writes=("rewards",)))


def test_a_nodes_own_state_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    graph = fakes.vector_loop(2, middle=counted)
    assert run(graph, tmp_path, 4) + run(graph, tmp_path, 9) == run(graph, None, 9)


class Strange(Counter):
    def state(self) -> Mapping[str, Any]:
        return {"path": Path("somewhere")}


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "start", lambda self, context: Strange())
    with pytest.raises(CheckpointError, match=r"state\(\) of node 'counting' holds a PosixPath; a state is made of None, numbers, text"):
        run(fakes.vector_loop(0, middle=counted), tmp_path, 4)


def test_weights_moved_into_a_second_pool_change_nothing(tmp_path: Path) -> None:
    first = run(fakes.vector_loop(1), tmp_path, 4)
    moved = fakes.vector_loop(1, pools=(Pool("generate", share=2), Pool("update")))
    assert first + run(moved, tmp_path, 8) == run(fakes.vector_loop(1), None, 8)


def test_starting_afresh_keeps_the_earlier_checkpoints_aside(tmp_path: Path) -> None:
    run(fakes.vector_loop(1), tmp_path, 4)
    assert run(fakes.vector_loop(1), tmp_path, 4, fresh=True) == run(fakes.vector_loop(1), None, 4)
    assert sorted(p.name for p in (tmp_path / "earlier-1").iterdir()) == ["step-00000003", "step-00000004"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run(fakes.vector_loop(0), tmp_path, 9, every=2, keep=3)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000006", "step-00000008", "step-00000009"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newest(folder: Path) -> Path:
    return sorted(folder.glob("step-*"))[-1]


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit of the weights": (
        lambda path: flip(path / "policy" / "__0_0.distcp"),
        "'policy/__0_0.distcp' was changed after it was written",
    ),
    "a flipped bit of a node": (lambda path: flip(path / "generator.pt"), "'generator.pt' was changed after it was written"),
    "a changed manifest": (lambda path: flip(path / "manifest.json"), "manifest.json was changed|is incomplete"),
    "a changed plan": (lambda path: flip(path / "plan.json"), "plan.json was changed after it was written"),
    "a missing file": (lambda path: (path / "prompts.pt").unlink(), "is incomplete"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "is incomplete"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_and_the_one_before_can_be_gone_on_from(name: str, tmp_path: Path) -> None:
    run(fakes.vector_loop(1), tmp_path, 7)
    breaking, message = BROKEN[name]
    breaking(newest(tmp_path))
    with pytest.raises(CheckpointError, match=message) as raised:
        run(fakes.vector_loop(1), tmp_path, 9)
    assert f"delete '{newest(tmp_path)}' to resume from the one before" in str(raised.value)
    newest(tmp_path).rename(tmp_path / "broken")
    assert run(fakes.vector_loop(1), tmp_path, 9) == run(fakes.vector_loop(1), None, 9)[6:]


def test_half_a_checkpoint_is_swept_and_never_taken(tmp_path: Path) -> None:
    run(fakes.vector_loop(1), tmp_path, 3)
    (tmp_path / ".part-dead-00000009").mkdir()
    assert run(fakes.vector_loop(1), tmp_path, 6) == run(fakes.vector_loop(1), None, 6)[3:]
    assert not list(tmp_path.glob(".part-*"))


OTHERS: dict[str, tuple[Callable[[], Graph], str]] = {
    "another depth": (lambda: fakes.vector_loop(2), "'feedback' 'weights' 'depth' was 1 and is 2"),
    "another batch": (lambda: fakes.vector_loop(1, count=6), "'nodes' 'prompts' 'rows' was 4 and is 6"),
    "another node": (lambda: fakes.vector_loop(1, middle=counted), "'nodes' 'score' is missing now"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_graph_is_refused_saying_what_differs(name: str, tmp_path: Path) -> None:
    run(fakes.vector_loop(1), tmp_path, 3)
    other, difference = OTHERS[name]
    with pytest.raises(CheckpointError, match=f"is of another graph: {difference}; pass another folder, or launch with fresh=True"):
        run(other(), tmp_path, 6)


def test_a_data_set_that_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(fakes.vector_loop(1), tmp_path, 3)
    monkeypatch.setattr(fakes, "ITEMS", fakes.ITEMS[:-1])
    with pytest.raises(CheckpointError, match="'prompts' 'items' was 12 and is 11"):
        run(fakes.vector_loop(1), tmp_path, 6)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        job(fakes.vector_loop(1), tmp_path / "file" / "checkpoints")


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    with job(fakes.vector_loop(1), tmp_path), pytest.raises(CheckpointError, match="is in use by another job"):
        job(fakes.vector_loop(1), tmp_path)


def test_a_disk_that_is_full_costs_the_new_checkpoint_and_not_the_old(tmp_path: Path) -> None:
    whole = run(fakes.vector_loop(1), None, 9)
    run(fakes.vector_loop(1), tmp_path, 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint of step 6 could not be written by worker '.*': .* MiB are free"):
            run(fakes.vector_loop(1), tmp_path, 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run(fakes.vector_loop(1), tmp_path, 9) == whole[3:]
    assert not list(tmp_path.glob(".part-*"))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("print('code ran')",)  # not print itself: Ray puts another in its place


def test_a_table_of_contents_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distributed_checkpoint.write(tmp_path, {"vector": torch.ones(2)}, 0, None)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"asks for 'builtins\.exec'"):
        distributed_checkpoint.read(tmp_path, {"vector": torch.zeros(2)})
    assert "code ran" not in capsys.readouterr().out


@dataclass(frozen=True)
class Attribute:
    """Pickled as getattr of a class."""

    of: type
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_a_table_of_contents_takes_members_of_an_enumeration_by_name_and_nothing_else_of_a_class(tmp_path: Path) -> None:
    encoding = metadata._MEM_FORMAT_ENCODING
    found = distributed_checkpoint._Contents(io.BytesIO(pickle.dumps(Attribute(encoding, "TORCH_CHANNELS_LAST")))).load()
    assert found is encoding.TORCH_CHANNELS_LAST
    for kind, name in ((encoding, "__init__"), (type(tmp_path), "write_text")):
        with pytest.raises(CheckpointError, match=f"asks for '{name}' of"):
            distributed_checkpoint._Contents(io.BytesIO(pickle.dumps(Attribute(kind, name)))).load()


def test_the_manifest_says_what_a_checkpoint_holds(tmp_path: Path) -> None:
    run(fakes.vector_loop(1), tmp_path, 5)
    manifest = json.loads((newest(tmp_path) / "manifest.json").read_text())
    assert (manifest["step"], manifest["weight_version"], manifest["metrics_lines"]) == (5, 5, 5)
    assert len(manifest["cursors"]["prompts"].pop("digest")) == 16
    assert manifest["cursors"] == {"prompts": {"items": 12, "seed": 1, "next": 20}}
    assert manifest["settings"]["feedback weights"]["depth"] == "1"
    assert {part["worker"] for part in manifest["parts"]} == {"prompts", "generator", "score", "policy"}


def test_other_rows_and_another_order_are_refused_and_checkpoints_without_a_digest_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(fakes.vector_loop(1), tmp_path, 3)
    items = list(fakes.ITEMS)
    for other in (items[::-1], [{**items[0], "prompt": "other"}, *items[1:]]):
        monkeypatch.setattr(fakes, "ITEMS", other)
        with pytest.raises(
            CheckpointError, match=r"was made with other rows of \['prompts'\], or the same in another order; pass the same"
        ):
            run(fakes.vector_loop(1), tmp_path, 5)
    manifest = newest(tmp_path) / "manifest.json"
    written = json.loads(manifest.read_text())
    del written["cursors"]["prompts"]["digest"]
    text = json.dumps(written)
    manifest.write_text(text)
    manifest.with_suffix(".sha256").write_text(hashlib.sha256(text.encode()).hexdigest())
    assert len(run(fakes.vector_loop(1), tmp_path, 5)) == 2


def test_a_worker_knows_the_drivers_checkpoint_folder_from_another_of_that_path(tmp_path: Path) -> None:
    graph = fakes.vector_loop(1)
    checkpoints = Checkpoints(graph, compile_plan(graph, Cluster(cpus=2)), Recovery(tmp_path / "driver", 3, 2))
    checkpoints.open()
    for _ in range(2):  # each session has its own note
        start = checkpoints.start()
        saving = Saving(start.folder, start.id, 3, 0, trained=False, open=())
        assert describe_missing_folder(saving, 0) == ""
        assert describe_missing_folder(replace(saving, id="another"), 0) == start.id
    checkpoints.close()
    assert describe_missing_folder(replace(saving, folder=str(tmp_path / "own")), 0).startswith("FileNotFoundError")
