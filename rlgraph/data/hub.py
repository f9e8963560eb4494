"""Rows of a data set of the Hugging Face hub, or of a folder that `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

from rlgraph.data.files import INSTALL
from rlgraph.data.rows import Policy, Rows, made, present_row
from rlgraph.errors import DataError
from rlgraph.settings import Count, Name, checked


@checked(DataError)
def huggingface(
    path: Name,
    split: Name = "train",
    *,
    config: str | None = None,
    revision: str | None = None,
    overlong: Policy = "error",
    max_prompt_tokens: Count | None = None,
    **fields: str,
) -> Rows:
    """Read a split of a data set by its hub id, or of a folder of `Dataset.save_to_disk`. Give a `revision` so that it never changes.

        rows = rg.data.huggingface("openai/gsm8k", "train", config="main", prompt="question", answer="answer")

    >>> import datasets, tempfile, rlgraph as rg
    >>> datasets.disable_progress_bars()
    >>> folder = tempfile.mkdtemp()
    >>> datasets.Dataset.from_list([{"question": "1 + 1 =", "answer": "2"}]).save_to_disk(folder)
    >>> rg.data.huggingface(folder, prompt="question", answer="answer")[0]
    {'prompt': '1 + 1 =', 'answer': '2'}

    `fields`, `overlong` and `max_prompt_tokens` are those of `rg.data.rows`. Raises DataError where it cannot be loaded, as without a
    network and without a copy in the cache.
    """
    return made(loaded(path, split, config, revision), f"'{path}'", fields, overlong, max_prompt_tokens, present_row)


def loaded(path: str, split: str, config: str | None, revision: str | None) -> Any:
    """Load a `datasets.Dataset`. Raises DataError."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"data set '{path}': data sets of the hub are read by datasets, which is not installed: {INSTALL}") from None
    try:
        if (Path(path) / "state.json").exists():
            return datasets.load_from_disk(path)
        if (Path(path) / "dataset_dict.json").exists():
            return datasets.load_from_disk(path)[split]
        return datasets.load_dataset(path, config, split=split, revision=revision)
    except Exception as error:
        raise DataError(
            f"data set '{path}' ({split}) cannot be loaded: {type(error).__name__}: {error!s:.200}; check its name, split and network, or "
            "download it and give its files, as rg.data.parquet('folder/*.parquet')"
        ) from error
