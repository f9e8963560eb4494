"""The model folder and the data that verl is run with: those of `peer_job.py`, in verl's formats.

    python benchmarks/peers/inputs.py data FOLDER
    python benchmarks/peers/inputs.py model FOLDER [--shape 4B]

verl wants chat messages: each sum is one user message, and the chat template of the model folder gives its content back unchanged,
so that both libraries read the same 22 tokens.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ROWS, SEED = 4096, 1


def sums(count: int) -> list[dict[str, Any]]:
    """Make rows in verl's schema: a prompt of messages, and the sum as the ground truth of a rule."""
    drawn = random.Random(SEED)
    rows = []
    for index in range(count):
        a, b = drawn.randint(1, 9), drawn.randint(1, 9)
        rows.append(
            {
                "data_source": "addition",
                "prompt": [{"role": "user", "content": f"2 + 3 = 5\n7 + 6 = 13\n{a} + {b} ="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index},
            }
        )
    return rows


def write_data(folder: Path) -> None:
    """Write train.parquet and val.parquet."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", ROWS), ("val", 128)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(sums(count)), folder / f"{name}.parquet")


def write_model(folder: Path, shape: str | None) -> None:
    """Write SmolLM2-135M, or random weights of a Qwen3 shape with SmolLM2's tokenizer, with the template above."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

    import rlgraph as rg

    source = rg.model_folder("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    if shape is None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    else:
        from benchmarks.lib.shapes import config

        own: Any = config(shape)
        own.eos_token_id = tokenizer.eos_token_id
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen3ForCausalLM(own).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40GB")
    tokenizer.save_pretrained(folder)
    text = sums(1)[0]["prompt"][0]["content"]
    again = AutoTokenizer.from_pretrained(folder)
    rendered = again.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    if rendered != text:
        raise SystemExit(f"the chat template gives {rendered!r} instead of the text {text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "model"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape")
    given = parser.parse_args()
    if given.what == "data":
        write_data(given.folder)
    else:
        write_model(given.folder, given.shape)
