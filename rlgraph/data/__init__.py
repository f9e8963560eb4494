"""Data for `rg.prompts` and `rg.evaluate`: files, data sets of the hub and published schemas, as `rg.data.verl("train.parquet")`."""

from rlgraph.data.files import huggingface, jsonl, parquet
from rlgraph.data.rows import Mix, Results, Rows, mix, rows
from rlgraph.data.schemas import aime, conversational, dapo_math, gsm8k, verl
from rlgraph.data.streams import Stream, stream

__all__ = [
    "Mix",
    "Results",
    "Rows",
    "Stream",
    "aime",
    "conversational",
    "dapo_math",
    "gsm8k",
    "huggingface",
    "jsonl",
    "mix",
    "parquet",
    "rows",
    "stream",
    "verl",
]
