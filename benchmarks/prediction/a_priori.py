"""Step times that `rg.compile` estimates without any measurement, beside measured runs on H200s.

    python benchmarks/prediction/a_priori.py [--json PATH]      # the table; runs nothing and needs no GPU
    python benchmarks/prediction/a_priori.py --fit              # the numbers of `rlgraph/plan/estimates.py`, derived from their sources
    python benchmarks/prediction/a_priori.py --smoke            # a few rows

An estimate uses the graph, the cluster, the models' config.json and the limit on response lengths. Its times of the host and of the
logits come from a table that was fitted to some of these runs, marked "fit"; the others were held out. If lengths have a tail, the
estimate is given their distribution, as by a user who knows the task.

The measured side is read from `benchmarks/results/`. `peer_job.py` measures other shapes, on two GPUs:

    cd benchmarks && set -- engines_per_gpu=1 steps=5
    python peer_job.py model=0.6B prompts=32 micro_batch_tokens=16384 $@ json=results/peer_job_0.6b_h200.json
    python peer_job.py model=4B prompts=32 micro_batch_tokens=8192 $@ json=results/peer_job_4b_h200.json
    python peer_job.py model=8B mode=colocated prompts=16 micro_batch_tokens=8192 $@ json=results/peer_job_8b_h200.json
"""

import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from benchmarks.lib.shapes import SHAPES, VOCAB
from benchmarks.peers import peer_job
from benchmarks.prediction import prediction_gpu
from benchmarks.prediction.ways import Way
from benchmarks.speed import overlap
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan import estimates
from rlgraph.plan.cost_functions import Passes, Setting
from rlgraph.plan.estimates import DECODING
from rlgraph.plan.lengths import PROBABILITIES
from rlgraph.plan.model_shapes import AdapterSize, ModelShape, shapes_of
from rlgraph.plan.roofline import DEVICES, OPTIMIZER_BYTES, TRAINING, operations, priced_for

RESULTS = Path(__file__).parents[1] / "results"
H200 = DEVICES["H200"]
SMOLLM2 = (576, 30, 9, 3, 1536, True)
Unexplained = tuple[float, float, float]  # decode steps, sequences in them, and the seconds that reading the memory does not explain
PROMPT_TOKENS = 97.0  # of the sequences of 4,096 tokens that updates were measured with
FITTED = ("one_step_off",)  # of peer_job_h200.json
# Engines looked at each sequence in each decode step when most runs were measured; those are estimated with the times of that engine.
BEFORE = {"DECODE_STEP_S": 1.18e-3, "DECODE_SEQUENCE_S": 13.3e-6, "SHARING": 1.26}
SINCE = ("0.6B, one engine", "1.7B, one engine")  # announced runs of the present engine
DECODED = ("smollm2_1024", "smollm2_256", "0.6b_256", "1.7b_64", "1.7b_256", "4b_256")  # of decode_steps_…_h200.json


@dataclass(frozen=True)
class EstimatedRun:
    """The estimated and the measured step of a run. `held_out`: the table was not fitted to this run."""

    name: str
    estimated_s: float
    measured_s: float
    held_out: bool

    @property
    def ratio(self) -> float:
        return self.estimated_s / self.measured_s


def shape(name: str) -> dict[str, Any]:
    """Make the config.json of a shape."""
    hidden, layers, heads, kv_heads, intermediate, tied = SMOLLM2 if name == "smollm2" else SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM" if name == "smollm2" else "Qwen3ForCausalLM"],
        "model_type": "llama" if name == "smollm2" else "qwen3",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 64 if name == "smollm2" else 128, "intermediate_size": intermediate, "tie_word_embeddings": tied,
        "vocab_size": 49152 if name == "smollm2" else VOCAB,
    }  # fmt: skip


def folder(name: str, models: Path) -> str:
    """Make a folder with the configuration of a shape and nothing else: an estimate reads no weights."""
    made = models / f"qwen3-{name}"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(shape(name)))
    return str(made)


def cluster(gpus: int) -> rg.Cluster:
    return rg.Cluster(gpus=gpus, cpus=16 * gpus, gpus_per_node=gpus, gpu="NVIDIA H200")


def estimated(graph: rg.Graph, gpus: int, median_tokens: int | None = None, most_tokens: int = 0) -> float:
    """Estimate the step of a graph; with a median, its lengths are geometric."""
    costs = None
    if median_tokens is not None:
        tokens = [min(math.ceil(-math.log2(max(1 - p, 1e-12)) * median_tokens), most_tokens) for p in PROBABILITIES]
        costs = priced_for(graph, cluster(gpus), None, shapes_of(graph))
        assert costs.lengths is not None
        costs = replace(costs, lengths=replace(costs.lengths, at=PROBABILITIES, tokens=tuple(map(float, tokens))))
    return rg.compile(graph, cluster(gpus), costs).prediction.step_s


def loaded(name: str) -> Any:
    file = RESULTS / name
    return json.loads(file.read_text()) if file.is_file() else None


@contextlib.contextmanager
def engine_before() -> Iterator[None]:
    """Estimate with the host times of the engine that most runs were measured with."""
    now = {name: getattr(estimates, name) for name in BEFORE}
    for name, value in BEFORE.items():
        setattr(estimates, name, replace(now[name], value=value))
    try:
        yield
    finally:
        for name, value in now.items():
            setattr(estimates, name, value)


def sharing_up_to(prompts: float) -> Any:
    """Estimate as if responses of up to so many prompts shared a prompt: all when the announced runs were measured, none before."""
    return patch("rlgraph.batching.cutting.LONGEST", prompts)


def compared(models: Path) -> Iterator[EstimatedRun]:
    """Yield every run of the results that an estimate can be made for."""
    with sharing_up_to(math.inf):
        yield from announced(models, since=True)
    with engine_before():
        with sharing_up_to(math.inf):
            yield from announced(models, since=False)
        with sharing_up_to(0):
            yield from measured_before(models)


def announced(models: Path, *, since: bool) -> Iterator[EstimatedRun]:
    """Yield the announced runs of the present engine, or those of the one before."""
    for name, run in loaded("announced_h200.json").items():
        if "step_s" in run and (name in SINCE) == since:
            cfg = peer_job.Config(**run["settings"] | {"model": folder(run["settings"]["model"], models)})
            yield EstimatedRun(f"{name}, announced", estimated(peer_job.graph(cfg), len(run["gpus"])), run["step_s"], True)


def measured_before(models: Path) -> Iterator[EstimatedRun]:
    """Yield the runs of the engine before, and updates alone, which know no engine."""
    for name, run in loaded("peer_job_h200.json").items():
        cfg = peer_job.Config(**run["settings"] | {"model": folder("smollm2", models)})
        yield EstimatedRun(f"135M, peer job, {name}", estimated(peer_job.graph(cfg), 2), run["step_s"], name not in FITTED)
    for name in ("0.6B", "4B", "8B"):
        for job, run in (loaded(f"peer_job_{name.lower()}_h200.json") or {}).items():
            cfg = peer_job.Config(**run["settings"] | {"model": folder(name, models)})
            yield EstimatedRun(f"{name}, peer job, {job}", estimated(peer_job.graph(cfg), 2), run["step_s"], True)
    for name, gpus in (("overlap_h200.json", 2), ("overlap_4b_four_gpus_h200.json", 4)):
        run = loaded(name)
        settings = overlap.Config(**run["settings"] | {"models": str(models)})
        folder(settings.shape, models)
        for mode in ("one_step_off", "colocated"):
            if mode in run:
                graph = overlap.graph(settings, mode == "colocated")
                step_s = estimated(graph, gpus, settings.median_tokens, settings.max_tokens)
                yield EstimatedRun(f"{settings.shape}, a tail, {gpus} GPUs, {mode}", step_s, run[mode]["step_s"], True)
    for one in loaded("prediction_h200.json")["configurations"]:
        way = Way(**one["way"])
        folder(way.model, models)
        graph = prediction_gpu.graph(way, prediction_gpu.Models(models, False, f"{models}/qwen3-"))
        step_s = estimated(graph, way.gpus, way.tokens if way.tail else None, way.most_tokens)
        yield EstimatedRun(f"{way.model}, {one['name']}", step_s, one["measured_s"], one["name"] != "twice the prompts")
    yield from updates(models)


def updates(models: Path) -> Iterator[EstimatedRun]:
    """Yield the updates of packed 4k sequences on one GPU, alone; `predicted_runs.py` has those on two."""
    took = {"4B": loaded("training_h200.json")["runs"]["4B:1"]["step_s"]}
    compiled = {name: run["eight_of_4096_s"] for name, run in loaded("update_profile_h200.json")["runs"].items()}
    for name, step_s in [*took.items(), *compiled.items()]:
        cfg = peer_job.Config(mode="colocated", model=folder(name, models), prompts=1, response_tokens=4000, compiled=name in compiled)
        graph = peer_job.graph(cfg)
        costs = priced_for(graph, cluster(1), None, shapes_of(graph))
        assert costs.lengths is not None
        lengths = replace(costs.lengths, prompt_tokens=PROMPT_TOKENS)
        estimated_s = float(costs.cost_of("update").seconds(Setting(1, 1, 8, Passes(8192)), lengths, 1, 8)[0])
        yield EstimatedRun(f"{name}, {'a compiled' if cfg.compiled else 'an'} update on 1", estimated_s, step_s, name != "1.7B")


def fit() -> dict[str, float]:
    """Derive the numbers of the table from their sources."""
    costs = loaded("prediction_h200.json")["costs"]
    smollm2, others = shape_of("smollm2"), {name: shape_of(name) for name in costs}
    read = H200.bandwidth * DECODING
    peer = loaded("peer_job_h200.json")["one_step_off"]
    settings, length = peer["settings"], peer["settings"]["response_tokens"]
    steps = [loaded(f"decode_steps_{name}_h200.json") for name in DECODED]
    left = [(1.0, float(each["sequences"]), each["ways"]["recorded"]["step_s"] - each["bytes"] / read) for each in steps]
    step_s, sequence_s = least_squares(left)
    many = loaded("generation_engines_h200.json")  # engines that share a GPU take turns on it
    rows, tokens, engines = many["sequences"] // 4, many["tokens"], 4
    gpu = (2 * smollm2.active_parameters + rows * smollm2.kv_bytes_per_token() * tokens / 2) / read * engines
    shared = (many["seconds"]["rlgraph, 4 engines"] / tokens - gpu) / (step_s + rows * sequence_s)
    update = {name: each["nodes"]["update"] for name, each in costs.items()}
    per_token = [(others[name], each["token_s"]) for name, each in update.items()]
    per_token.append((smollm2, peer["timings"]["timing_s/update_actor"] / (settings["prompts"] * settings["group_size"] * (length + 22))))
    logits = [(s - 6 * of.active_parameters / (H200.flops * TRAINING)) / of.vocab * read for of, s in per_token]
    sleeps = [part["bytes"] / part[side] for each in costs.values() for part in each["sleep"].values() for side in ("sleep_s", "wake_s")]
    return {
        "DECODE_STEP_S": step_s,
        "DECODE_SEQUENCE_S": sequence_s,
        "SHARING": shared ** (1 / math.log2(engines)),
        "PASS_LAYER_S": statistics.fmean(each["pass_s"] / others[name].layers for name, each in update.items()),
        "SHARDED_PASS_LAYER_S": statistics.fmean(each["sharded_pass_s"] / others[name].layers for name, each in update.items()),
        "LOGIT_BYTES": statistics.fmean(logits),
        **compiled_updates(),
        "COPYING": statistics.median(sleeps) / H200.host_link,
        "MOMENTS_COPYING": moments_copying(),
        "MERGED_BYTES": merged_bytes(),
    }


def compiled_updates() -> dict[str, float]:
    """Divide the seconds of two profiled updates by kinds of kernels. Attention reaches what other kernels leave of whole updates."""
    read, found = H200.bandwidth * DECODING, dict[str, list[float]]()

    def note(**numbers: float) -> None:
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)

    def mean(name: str) -> float:
        return statistics.fmean(found[name])

    profiles = [(shape_of(name), run, run["kernel_s"]) for name, run in loaded("update_profile_h200.json")["runs"].items()]
    for of, run, kernels in profiles:
        note(
            PRODUCTS=6 * of.active_parameters * run["tokens"] / H200.flops / kernels["products"],
            COMPILED_BYTES=kernels["others"] * read / run["tokens"] / (of.layers * of.layer_widths),
            FUSED_LOGIT_BYTES=kernels["logits"] * read / run["tokens"] / of.vocab,
        )
    for spec, run in loaded("training_flash2_h200.json")["runs"].items():
        of, tokens = shape_of(spec.split(":")[0]), run["step_s"] * run["tokens_per_s"]
        products, attention = operations(ModelTraits(), of, 4096 / 2, trains=True)
        moved = mean("COMPILED_BYTES") * of.layers * of.layer_widths + mean("FUSED_LOGIT_BYTES") * of.vocab
        others = products / mean("PRODUCTS") / H200.flops + moved / read + OPTIMIZER_BYTES * of.parameters / read / tokens
        note(ATTENTION=attention / H200.flops / (run["step_s"] / tokens - others))
    for of, run, kernels in profiles:
        _, of_a_key = operations(ModelTraits(), of, 1, trains=True)
        keys = kernels["attention"] * mean("ATTENTION") * H200.flops / of_a_key / run["tokens"]
        note(SHARED_KEYS=keys - run["response_tokens"] / 2)
    return {name: mean(name) for name in found}


def shape_of(name: str) -> ModelShape:
    found = ModelShape.from_config(shape(name))
    assert found is not None
    return found


def moments_copying() -> float:
    """Return the bytes of moments that come and go each second of an optimizer step, over those of the link one way."""
    on_gpu, on_host = loaded("small_gpu_h200.json")["parts"]["moments"]["runs"].values()
    seconds: float = on_host["update_s"] - on_gpu["update_s"]
    return 2 * int(on_gpu["planned"]["optimizer"]) / seconds / H200.host_link


def merged_bytes() -> float:
    """Return the traffic of memory for each number of a matrix that an adapter is merged into."""
    found = loaded("small_gpu_h200.json")["parts"]["lora_publish"]
    seconds: float = found["merged_s"]
    return seconds * H200.bandwidth / AdapterSize.of(shape_of(found["shape"]), found["rank"], "all-linear").matrices


def least_squares(jobs: list[Unexplained]) -> tuple[float, float]:
    """Fit the seconds of a step and of a sequence to the jobs, each job counting alike, neither of them below 0."""
    a = np.array([[steps / whole, sequences / whole] for steps, sequences, whole in jobs])
    step_s, sequence_s = np.linalg.lstsq(a, np.ones(len(jobs)), rcond=None)[0]
    return max(float(step_s), 0.0), max(float(sequence_s), 0.0)


def main() -> None:
    arguments = command_line(__doc__, smoke="the first rows only")
    arguments.add_argument("--fit", action="store_true", help="derive the table of host times again")
    given = arguments.parse_args()
    if given.fit:
        for name, value in fit().items():
            print(f"{name:22} {value:10.3g}   in the table {getattr(estimates, name).value:10.3g}   {getattr(estimates, name).source}")
        return
    rows = []
    with tempfile.TemporaryDirectory() as models:
        for one in compared(Path(models)):
            rows.append(one)
            print(f"{one.name:48} {one.estimated_s:7.2f} s, took {one.measured_s:6.2f} s, {one.ratio:5.2f}  "
                  f"{'held out' if one.held_out else 'fit'}", flush=True)  # fmt: skip
            if given.smoke and len(rows) == 3:
                break
    held_out = [max(one.ratio, 1 / one.ratio) for one in rows if one.held_out]
    print(f"held out: median factor {statistics.median(held_out):.2f}, worst {max(held_out):.2f} of {len(held_out)}")
    if given.json:
        figures = {
            "median_factor_held_out": statistics.median(held_out),
            "worst_factor_held_out": max(held_out),
            "held_out": len(held_out),
            "rows": [vars(one) | {"ratio": one.ratio} for one in rows],
        }
        write(given.json, figures)


if __name__ == "__main__":
    main()
