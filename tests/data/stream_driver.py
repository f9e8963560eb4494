"""A program that draws prompts of a stream and is killed: `python stream_driver.py KIND FOLDER STEPS`. Says each step that it has done."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

import rlgraph as rg
from rlgraph.compiler.cluster import Cluster
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def rows() -> Iterator[dict[str, Any]]:
    for n in range(40):
        yield {"prompt": f"row {n}"}


def data() -> Any:
    stream = datasets.Dataset.from_list(list(rows())).to_iterable_dataset(num_shards=4)
    return {"function": rows, "iterable": stream, "shuffled": stream.shuffle(seed=2, buffer_size=6)}[kind]


@rg.node(reads="prompt_texts", writes="sizes")
def drawn(batch: Any) -> Any:
    texts.append(batch["prompt_texts"])
    return {"sizes": [str(len(text)) for text in batch["prompt_texts"]]}


texts: list[list[str]] = []
graph = rg.Graph("drawing", drawn(rg.prompts(data(), count=4)))
plan = rg.compile(graph, Cluster(cpus=2))
with (
    LocalJob(graph, plan, Checkpoints(graph, plan, Recovery(folder / "checkpoints", 3, 2))) as job,
    (folder / "drawn.jsonl").open("a") as out,
):
    for step in job.steps(steps):
        out.write(json.dumps({"step": step.index, "texts": texts[-1]}) + "\n")
        out.flush()
        print(step.index, flush=True)
        time.sleep(0.1)  # here it is killed: few steps later
