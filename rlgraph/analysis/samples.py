"""The samples and profiles in the folder of a run: what each file holds, and how to read it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlgraph.errors import DataError

FOLDER = "samples"
LINES, TABLE = ".jsonl", ".parquet"

Sample = Mapping[str, Any]
FIELDS: dict[str, str] = {
    "step": "the step that trained on it, or at which it answered an evaluation",
    "kind": "training or evaluation",
    "rollout": "the node that sampled it",
    "row": "its row in the batch of the step",
    "group": "the place of its prompt in the data order; of an evaluation, its item",
    "prompt": "the prompt as text, a run of the tokens of an image as one",
    "images": "the images of the prompt and of tools as data URLs, at most 192 pixels a side",
    "response": "the response as text, special tokens included",
    "reward": "its reward",
    "advantage": "the mean advantage of its tokens",
    "finish": "why it ended: stop, length, turns or abort",
    "prompt_tokens": "tokens of the prompt",
    "response_tokens": "tokens that the policy wrote",
    "version_min": "the oldest version of the weights that wrote a token",
    "version_max": "the newest one",
    "log_prob_diff": "the mean of token_log_prob_diffs",
    "columns": "other columns with one value a response or a prompt",
    "token_texts": "the text of each token of the response, tokens of tools included",
    "token_ids": "its id",
    "token_policy": "1 on tokens that the policy wrote, 0 on those of tools",
    "token_trained": "1 on tokens that count in the loss, where a correction masks some",
    "token_rewards": "the reward of an environment that stands at it: at the last token of each turn",
    "token_advantages": "the advantage of each token",
    "token_versions": "the version of the weights that wrote it",
    "token_log_probs": "its log-prob when it was sampled",
    "token_log_prob_diffs": "the trainer's log-prob at the start of the update minus that of the engine, in nats",
}


def sample_files(folder: str | Path) -> list[Path]:
    """List the files of samples of a run's folder, oldest steps first."""
    return sorted(path for path in (Path(folder) / FOLDER).glob("samples-*") if path.suffix in (LINES, TABLE))


def read_samples(folder: str | Path) -> Iterator[Sample]:
    """Read the samples that `rlgraph.record` wrote into a folder, step by step: dicts with the keys of `FIELDS`.

        for sample in read_samples("runs/math"):
            print(sample["step"], sample["reward"], sample["response"])

    A last line that is still being written is left out. Raises DataError for parquet files if pyarrow is not installed.
    """
    for path in sample_files(folder):
        yield from read_file(path)


def read_file(path: Path) -> Iterator[Sample]:
    """Read one file of samples."""
    if path.suffix == TABLE:
        for row in parquet().read_table(path).to_pylist():
            yield {**row, "columns": json.loads(row["columns"])}
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def parquet() -> Any:
    """Import pyarrow's parquet. Raises DataError with the command that installs it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"samples in parquet files need pyarrow ({error}): pip install 'rlgraph-dataflow[data]'") from None
    return pyarrow.parquet


# The profiles in the folder of a run: traces and memory snapshots, named by worker and steps.

PROFILES_FOLDER = "profiles"
TRACE, OPERATORS, MEMORY = ".trace.json.gz", ".operators.txt", ".memory.pickle"
KINDS = {
    TRACE: "trace of torch.profiler: open it in ui.perfetto.dev",
    OPERATORS: "table of its operators",
    MEMORY: "history of CUDA's memory: open it in pytorch.org/memory_viz",
}


def profile_files(folder: str | Path) -> list[tuple[Path, str]]:
    """List the files of profiles of a run's folder, each with what it is."""
    found = sorted((Path(folder) / PROFILES_FOLDER).glob("*"))
    return [(path, said) for path in found for ending, said in KINDS.items() if path.name.endswith(ending)]
