"""Ranks that share a model, forked: started by a test, `run_ranks`, and what each does, `be_rank`."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.forked_workers import server
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, returns_of
from support.trainer_engines import fsdp_engine, megatron_engine
from torch.nn.functional import scaled_dot_product_attention

from rlgraph.algorithms import ValueLoss
from rlgraph.algorithms.masks import Totals
from rlgraph.channels.weights.shards import Assembly, WeightShard
from rlgraph.engines.forward import packed_attention
from rlgraph.engines.forward.head import AT_ONCE, PolicyHead, ValueHead
from rlgraph.engines.fsdp.sharding import own_box
from rlgraph.engines.hf.export import ExportLayout, GrowingExport, plan_files, write_shards
from rlgraph.engines.hf.folder_weights import folder_shards
from rlgraph.settings import Recompute
from rlgraph.values.optimizers import AdamW, Muon

STEPS = 4
PATIENCE_S = 280  # of ranks that compile on busy cores
PLAIN_COMPILE = torch.nn.Module.compile
GOES_ON = 3  # steps, from a state that another engine saved
MICRO_BATCH_TOKENS = 48  # two passes
NEAR = {"atol": 5e-6, "rtol": 5e-6}
AFTER_STEPS = {"atol": 5e-6, "rtol": 2e-5}  # in which rounding adds up, on some processors to 8e-6
# A large eps: else Adam makes a whole step of a gradient that is nothing but rounding, and no two ways to sum would agree.
ADAMW, MUON = AdamW(lr=5e-3, eps=1e-3, weight_decay=0.1, grad_clip=0.5), Muon(lr=1e-3, eps=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A model that is trained. Ranks write their boxes to an `export`, and go on from the state in `begins`."""

    name: str
    folder: Path
    kind: str = "policy"
    optimizer: AdamW = ADAMW
    saving: bool = False  # of memory: recomputes, a fused head of a few rows at a time, moments on the host
    begins: Path | None = None
    export: tuple[Path, ExportLayout] | None = None
    steps: int = STEPS
    trainer: str = "fsdp"
    load_balance: float = 0.0
    flat: bool = True
    recompute: Recompute = False
    compiled: str = ""  # by which compiler; the layers of one process are not


def engine_of(case: Case, rank: int = 0, world: int = 1, *, saving: bool = False, **ranks: int) -> Any:
    head = PolicyHead(case.folder, fused=saving) if case.kind == "policy" else ValueHead(case.folder)
    if case.trainer == "megatron":
        own: dict[str, Any] = {"dtype": torch.float32, "micro_batch_tokens": MICRO_BATCH_TOKENS, "fused_head": saving}
        own["recompute"] = saving or case.recompute
        return megatron_engine(head, optimizer=case.optimizer, rank=rank, world=world, **own, **ranks)
    given: dict[str, Any] = {"dtype": torch.float32, "micro_batch_tokens": MICRO_BATCH_TOKENS, "flat": case.flat}
    given["load_balance"] = case.load_balance
    given["shared"] = world > 1  # ranks that share prompts are held against one process that does not
    given["recompute"] = saving or case.recompute
    if case.compiled and world > 1:
        given |= {"compiled": True, "shared": False}
    return fsdp_engine(head, optimizer=case.optimizer, rank=rank, world=world, offload="moments" if saving else None, **given, **ranks)


def train_steps(engine: Any, kind: str, steps: int = STEPS, *, in_parts: bool = False) -> dict[str, Any]:
    """Score a batch, take steps on it, the last one on its two halves if `in_parts`, and tell what came of each."""
    batch, loss = batch_and_loss(kind)
    found: dict[str, Any] = {"weights": copy_shards(engine), "scores": engine.scores(batch, temperature=0.7)}
    if kind == "policy":
        found["squares"] = engine.scores_and_squares(batch, temperature=0.7)[1]
    found["metrics"] = [engine.update(batch, loss, temperature=0.7)]
    found["moments"] = copy_shards(engine, moments=True)  # of one step: the gradients
    found["metrics"] += [engine.update(batch, loss, temperature=0.7) for _ in range(steps - 2)]
    found["metrics"].append(learn_in_parts(engine, batch, loss) if in_parts else engine.update(batch, loss, temperature=0.7))
    return found | {"scores after": engine.scores(batch, temperature=0.7), "weights after": copy_shards(engine)}


def learn_in_parts(engine: Any, batch: dict[str, torch.Tensor], loss: Any) -> dict[str, float]:
    """Take a step on the halves of a batch, one after the other, before it is known how many tokens both have."""
    half, sums = len(LENGTHS) // 2, dict[str, float]()
    for rows in (slice(0, half), slice(half, None)):
        part = {name: column[rows] for name, column in batch.items()}
        for name, value in engine.add_gradients(part, loss, Totals(1, 1), temperature=0.7).items():
            sums[name] = sums.get(name, 0.0) + value
        engine.scores(part, temperature=0.7)
    tokens = int(batch["response_mask"].sum())
    metrics: dict[str, float] = engine.apply_gradients({name: value / tokens for name, value in sums.items()}, learns=True, divisor=tokens)
    return metrics


def batch_and_loss(kind: str) -> tuple[dict[str, torch.Tensor], Any]:
    """The batch that a model of this kind is trained on, and its loss."""
    return returns_of(batch_of(LENGTHS, holes=True)), WeightedLikelihood(entropy=0.1) if kind == "policy" else ValueLoss()


def continue_training(engine: Any, case: Case) -> list[dict[str, float]]:
    """Take some more steps, and tell the metrics of each."""
    batch, loss = batch_and_loss(case.kind)
    return [engine.update(batch, loss, temperature=0.7) for _ in range(GOES_ON)]


def run_one_process(
    cases: dict[str, Case], parent: Path, then: Callable[[Any, Case], dict[str, Any]] = lambda engine, case: {}
) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """Give what one process finds with a model and `then` does, and the folder of its state before that: computed once for each."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}

    def one(name: str) -> tuple[dict[str, Any], Path]:
        if name not in found:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            engine = engine_of(cases[name])
            result = train_steps(engine, cases[name].kind, cases[name].steps)
            engine.save(parent / name, 60.0)()
            found[name] = result | then(engine, cases[name]), parent / name
            engine.close()
            torch.set_num_threads(threads)
        return found[name]

    return one


def copy_shards(engine: Any, *, moments: bool = False) -> list[WeightShard]:
    """Copy the boxes of this rank: of the weights, or of the first moment of each."""
    shards = list(engine.weight_shards())
    if not moments:
        return [replace(shard, tensor=shard.tensor.clone()) for shard in shards]
    replicas = {(shard.name, shard.offsets): shard.replica for shard in shards}
    cut = folder_shards(chain.from_iterable(map(_first_moments, *zip(*engine.state().items(), strict=True))), engine._parts)
    return [replace(shard, tensor=shard.tensor.clone(), replica=replicas[shard.name, shard.offsets]) for shard in cut]


def _first_moments(key: str, tensor: torch.Tensor) -> list[WeightShard]:
    """The boxes of a tensor of a state, by the parameter's name, if it is a first moment."""
    for moment in (".exp_avg", ".momentum_buffer"):
        if key.endswith(moment):
            name = key.removeprefix("moments.").removesuffix(moment)
            held = getattr(tensor, "boxes", None)
            found = [own_box(name, tensor)] if held is None else [WeightShard(name, tuple(tensor.shape), *box) for box in held]
            return [replace(shard, replica=0) for shard in found]
    return []


def assemble_shards(ranks: list[list[WeightShard]]) -> dict[str, torch.Tensor]:
    """Put the boxes of all ranks together, as a generator does."""
    sent = [[shard for shard in shards if shard.replica == 0] for shards in ranks]
    return Assembly(sent).assemble([[shard.tensor for shard in shards] for shards in sent])


def check_training(
    one: dict[str, Any],
    many: list[dict[str, Any]],
    *,
    least: float = 1e-5,
    after: dict[str, float] = NEAR,
    scores_after: dict[str, float] = AFTER_STEPS,
    loaded: dict[str, torch.Tensor] | None = None,
) -> None:
    """Check that ranks found what one process did; what they read, and do not compute, to the bit. Metrics may differ by `least`."""
    assert all(rank["metrics"] == many[0]["metrics"] for rank in many)
    for column in [name for name in ("metrics", "goes on") if name in one]:
        for found, wanted in zip(many[0][column], one[column], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=least)
    for column in [name for name in ("scores", "squares", "scores after") if name in one]:
        assert all(torch.equal(rank[column], many[0][column]) for rank in many)
        torch.testing.assert_close(many[0][column], one[column], **(scores_after if column == "scores after" else NEAR))
    expected = {name: assemble_shards([one[name]]) for name in ("weights", "moments", "weights after")}
    expected |= {"loaded": loaded or expected["weights after"], "taken": expected["weights"]}
    for name in [name for name in expected if name in many[0]]:
        whole, near = assemble_shards([rank[name] for rank in many]), {"moments": NEAR, "weights after": after}.get(name)
        assert whole.keys() == expected[name].keys()
        for parameter, tensor in whole.items():
            torch.testing.assert_close(tensor, expected[name][parameter], **(near or {"atol": 0, "rtol": 0}))


def check_saved(engine: Any, folder: Path, many: list[dict[str, Any]]) -> None:
    """Check that one process goes on from the weights that ranks saved."""
    engine.load(folder)
    kept = assemble_shards([rank["weights after"] for rank in many])
    assert all(torch.equal(tensor, kept[name]) for name, tensor in assemble_shards([copy_shards(engine)]).items())


def be_rank(cases: list[Case], out: Path, rank: int, world: int, ranks: dict[str, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    for case in cases:
        if case.compiled:
            prepare_compiler(case.compiled)
        AT_ONCE["cpu"] = 4 * 288 if case.saving else 1 << 24
        engine = engine_of(case, rank, world, saving=case.saving, **ranks)
        found = train_steps(engine, case.kind, case.steps, in_parts=not (case.compiled or case.load_balance))
        engine.save(out / case.name, 60.0)()
        if case.export is not None:
            write_shards(*case.export, engine.weight_shards())
        if case.begins is not None:
            engine.load(case.begins)
            found["loaded"] = copy_shards(engine)
            found["goes on"] = continue_training(engine, case)
        if case.trainer == "megatron" and case.kind == "policy":
            engine.load_weights(load_file(case.folder / "model.safetensors"))
            found["taken"] = copy_shards(engine)
        if case.compiled:
            found["traced"] = count_graphs()
            for name in ("goes on", "goes on again"):
                engine.load(out / case.name)
                found[name] = continue_training(engine, case)
        torch.save(found, out / f"{case.name}.{rank}.pt")
        engine.close()
    dist.destroy_process_group()


def prepare_compiler(name: str) -> None:
    """Let layers be compiled by a compiler of this name, and attend in operations that can be traced, as the kernel of a GPU can."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = PLAIN_COMPILE
    torch.nn.Module.compile = lambda self, **given: plain(self, backend=name, **given)  # type: ignore[method-assign]
    packed_attention.attend = attend_by_mask


def attend_by_mask(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, cu_seq_lens_q: Any, scaling: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of a row, whatever their number, by a mask of the whole row."""
    places = torch.arange(query.shape[2])
    of = torch.searchsorted(cu_seq_lens_q, places, right=True)
    seen = (of[:, None] == of) & (places[:, None] >= places)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen[None, None], scale=scaling).transpose(1, 2), None


def count_graphs() -> dict[str, int]:
    """How many graphs the layers have become, and how often one ended before its layer did."""
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def run_ranks(cases: list[Case], out: Path, world: int, **ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Train each case on every rank, and return what each rank found, by the case's name."""
    out.mkdir(parents=True)
    pipe = template("megatron.core" if cases[0].trainer == "megatron" else "torch")
    pipe.send([(cases, out, rank, world, ranks) for rank in range(world)])
    assert pipe.poll(PATIENCE_S + 10), "a rank does not end"
    assert pipe.recv() == [0] * world
    return {case.name: [torch.load(out / f"{case.name}.{rank}.pt", weights_only=False) for rank in range(world)] for case in cases}


@cache
def template(module: str) -> Any:
    """Start a process that imports `module` and forks ranks: importing Megatron-Core costs each of 100 ranks six seconds of a core."""
    ours, theirs = server.Pipe()
    server.Process(target=fork_ranks, args=(module, theirs), daemon=True).start()
    theirs.close()
    return ours


def fork_ranks(module: str, pipe: Any) -> None:
    """Fork a rank for each argument list that the pipe brings, and reply with how each ended."""
    import_module(module)
    while True:
        ranks = []
        for given in pipe.recv():
            if not (child := os.fork()):
                signal.alarm(PATIENCE_S)  # ends the rank
                be_rank(*given)
                os._exit(0)
            ranks.append(child)
        pipe.send([os.waitpid(rank, 0)[1] for rank in ranks])


def run_exporting(cases: list[Case], folder: Path, world: int, whole: list[WeightShard], **ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Run the ranks, the first case with an export of the parameters that `whole` has, and check that it holds the weights after."""
    shapes = {shard.name: (shard.name, shard.global_shape) for shard in whole}
    with GrowingExport(folder / "exported", plan_files(shapes, "float32")) as growing:
        first = replace(cases[0], export=(growing.path, plan_files(shapes, "float32")))
        results = run_ranks([first, *cases[1:]], folder / "out", world, **ranks)
        growing.finish()
    exported = load_file(folder / "exported" / "model.safetensors")
    assert all(
        torch.equal(exported[name], one) for name, one in assemble_shards([rank["weights after"] for rank in results[first.name]]).items()
    )
    return results
