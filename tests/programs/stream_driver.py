"""A program that draws prompts of a stream and is killed: `python stream_driver.py KIND FOLDER STEPS`. Says each step that it has done."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

import rlgraph as rg
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

ROWS, COUNT = 30, 4


def rows() -> Iterator[dict[str, Any]]:
    for n in range(ROWS):
        yield {"prompt": f"row {n}"}


def data(kind: str) -> Any:
    stream = datasets.Dataset.from_list(list(rows())).to_iterable_dataset(num_shards=4)
    return {"function": rows, "iterable": stream, "shuffled": stream.shuffle(seed=2, buffer_size=6)}[kind]


def main(kind: str, folder: Path, steps: int) -> None:
    texts: list[list[str]] = []

    @rg.node(reads="prompt_texts", writes="sizes")
    def drawn(batch: Any) -> Any:
        texts.append(batch["prompt_texts"])
        return {"sizes": [str(len(text)) for text in batch["prompt_texts"]]}

    graph = rg.Graph("drawing", drawn(rg.prompts(data(kind), count=COUNT)))
    plan = rg.compile(graph, Cluster(cpus=2))
    checkpoints = Checkpoints(graph, plan, Recovery(folder / "checkpoints", 3, 2))
    with LocalJob(graph, plan, checkpoints) as job, (folder / "drawn.jsonl").open("a") as out:
        for step in job.steps(steps):
            out.write(json.dumps({"step": step.index, "texts": texts[-1]}) + "\n")
            out.flush()
            print(step.index, flush=True)
            time.sleep(0.1)  # so that the kill comes a few steps later


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
