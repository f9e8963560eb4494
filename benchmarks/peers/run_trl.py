"""TRL 1.16's GRPOTrainer on the job of `peer_job.py mode=colocated`, on one GPU with vLLM in the trainer's process.

    python benchmarks/peers/run_trl.py MODEL --site SITE [--rank 32] [--json PATH]     # MODEL: a folder, or a shape of shapes.py
    python benchmarks/peers/run_trl.py 3B-VL --image 512 --site SITE     # each prompt with an image; the tower is frozen, as rlgraph's is
    python benchmarks/peers/run_trl.py toy --site SITE --smoke     # two steps of a tiny model with transformers' own generation, on a CPU

SITE holds requirements_trl.txt; torch, transformers, accelerate and vLLM are those of the environment. README.md beside this says why each
setting differs from TRL's default. `step_s` is the time between TRL's own marks of a step's beginning and end, with the GPU's work done.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured

WARM_UP = 1  # steps that are not counted
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # fmt: skip


def settings(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Make the arguments of GRPOConfig for the job."""
    rows = given.prompts * given.group_size
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": given.engine_memory,
        "vllm_max_model_length": 64 + 2 * (given.image // 28 + 1) ** 2 + given.response_tokens,  # vLLM gets an image's tokens twice
        "vllm_enable_sleep_mode": given.sleep,
        "vllm_importance_sampling_correction": False,  # it takes a second pass over the responses
        # Random weights write marks of images too, which transformers would look for images of.
        "generation_kwargs": {"ignore_eos": True} | ({"logit_bias": {257 + mark: -100.0 for mark in range(4)}} if given.image else {}),
    }
    return {
        "output_dir": f"{folder}-trl",
        "per_device_train_batch_size": given.micro_batch_rows,
        "gradient_accumulation_steps": rows // given.micro_batch_rows,
        "steps_per_generation": rows // given.micro_batch_rows,
        "num_generations": given.group_size,
        "max_completion_length": given.response_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": 1e-5 if given.rank else 1e-6,
        "bf16": not given.smoke,
        "use_liger_kernel": not given.smoke,
        "gradient_checkpointing": given.checkpointing,
        "max_steps": given.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        **({"model_init_kwargs": {"dtype": "bfloat16"}} if given.rank else {}),  # frozen weights need no float32
        **({"use_cpu": True} if given.smoke else engine),
    }


def length(completions: list[Any], **columns: Any) -> list[float]:
    """The reward of `peer_job.py`: it differs between responses; what it says does not matter here."""
    texts = [found if isinstance(found, str) else found[0]["content"] for found in completions]  # of prompts with images: messages
    return [float(len(text)) for text in texts]


def train(given: argparse.Namespace, folder: str, arguments: dict[str, Any], done: Callable[[list[float]], None]) -> None:
    """Train so many steps; after each, `done` gets the seconds of all so far."""
    began = time.monotonic()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    seconds: list[float] = []

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **more: Any) -> None:
            self.start = now()

        def on_step_end(self, *given: Any, **more: Any) -> None:
            seconds.append(now() - self.start)
            print(f"TRL step {len(seconds)}: {seconds[-1]:.2f} s, {time.monotonic() - began:.0f} s since the start", flush=True)
            done(seconds)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    sums = [{"prompt": f"2 + 3 = 5\n7 + 6 = 13\n{a} + {b} ="} for a in range(1, 10) for b in range(1, 10)]
    more: dict[str, Any] = {"model": folder, "processing_class": tokenizer}
    if given.image:
        more, sums = seeing_arguments(folder, given.image)
    if given.rank:
        from peft import LoraConfig  # type: ignore[import-not-found]

        more["peft_config"] = LoraConfig(r=given.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        reward_funcs=length,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(sums * 20),
        callbacks=[Clock()],
        **more,
    )
    trainer.train()


def seeing_arguments(folder: str, side: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The arguments of the trainer for a model that reads images, its tower frozen, and the rows of `peer_job.py` as TRL has them."""
    import io

    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from benchmarks.peers.peer_job import sums_with_images

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"].removeprefix("<image>")}],
            "image": Image.open(io.BytesIO(row["images"][0])),
        }
        for row in sums_with_images(side)
    ]
    return {"model": model, "processing_class": AutoProcessor.from_pretrained(folder)}, rows


def parsed() -> argparse.Namespace:
    parser = command_line(__doc__, smoke="two steps without vLLM")
    parser.add_argument("model", help="a folder, or random weights of a Qwen3 shape")
    parser.add_argument("--site", type=Path, required=True, help="folder with TRL and what requirements_trl.txt names")
    parser.add_argument("--rank", type=int, default=0, help="train an adapter of this rank by PEFT; all weights without it")
    parser.add_argument("--image", type=int, default=0, help="pixels of a side of the image of each prompt; 0: prompts are text")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch-rows", type=int, default=16)
    parser.add_argument("--engine-memory", type=float, default=0.3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, as TRL does by default")
    parser.add_argument("--sleep", action="store_true", help="vLLM sleeps while the trainer works")
    parser.add_argument("--steps", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    given = parsed()
    if given.smoke:
        given.prompts, given.group_size, given.response_tokens, given.micro_batch_rows, given.steps = 2, 2, 8, 2, 2
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(given.site.resolve()))
    from benchmarks.peers.peer_job import model_path

    folder = model_path(given.model)
    arguments = settings(given, folder)
    train(given, folder, arguments, lambda seconds: write(given, arguments, seconds))


def write(given: argparse.Namespace, arguments: dict[str, Any], seconds: list[float]) -> None:
    """Print and keep what the steps took so far."""
    timed = seconds[WARM_UP:] or seconds
    print(f"TRL {given.model}: {statistics.median(timed):.2f} s a step (median of {len(timed)}, {min(timed):.2f} to {max(timed):.2f})")
    if given.json:
        row = {
            "model": given.model,
            "rank": given.rank,
            "image": given.image,
            "steps_timed": len(timed),
            "step_s": statistics.median(timed),
            "spread_s": [min(timed), max(timed)],
            "first_steps_s": seconds[:WARM_UP],
            "settings": arguments | {"output_dir": "MODEL-trl"},
            "trl": version("trl"),
            "liger": version("liger-kernel"),
        }
        write_measured(given.json, row)


if __name__ == "__main__":
    main()
