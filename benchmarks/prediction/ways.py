"""Configurations of a model on two or four GPUs whose step times are predicted from one of them."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Way:
    """A configuration: what is generated and trained a step, on which devices."""

    model: str
    prompts: int
    tokens: int  # of every response, or their median where they have a tail
    most_tokens: int
    micro_batch_tokens: int
    group_size: int = 8
    depth: int = 1
    gpus: int = 2
    rollout_gpus: int = 1  # of them, unless they are shared
    shared: bool = False  # generation and training take turns on all GPUs
    engines_per_gpu: int = 1
    chunks: int = 1

    @property
    def tail(self) -> bool:
        return self.most_tokens > self.tokens

    @property
    def sequences(self) -> int:
        """The most responses that one engine decodes at once, and so the largest decode step to record."""
        engines = self.engines_per_gpu * (self.gpus if self.shared else self.rollout_gpus)
        return self.group_size * -(-self.prompts // engines)

    @property
    def double(self) -> "Way":
        """The second configuration to profile, larger than the first: interpolation is more accurate than extrapolation."""
        return replace(self, prompts=2 * self.prompts, tokens=2 * self.tokens, most_tokens=2 * self.most_tokens)

    @property
    def turns(self) -> "Way":
        """The third configuration to profile: it measures waking and sleeping."""
        return replace(self, prompts=self.prompts // 2, depth=0, shared=True)

    @property
    def work(self) -> tuple[Any, ...]:
        """The work of a step, whatever the devices and the order."""
        return self.model, self.prompts, self.group_size, self.tokens, self.gpus


SMOLLM2 = "SmolLM2-135M"
LARGE = ("4B",)  # no GPU holds both of its models
ON_GPUS = (
    Way(SMOLLM2, prompts=32, tokens=128, most_tokens=128, micro_batch_tokens=16384),
    Way("0.6B", prompts=32, tokens=64, most_tokens=400, micro_batch_tokens=16384),
    Way("1.7B", prompts=16, tokens=96, most_tokens=96, micro_batch_tokens=8192),
    Way("4B", prompts=16, tokens=64, most_tokens=448, micro_batch_tokens=8192),
)
ON_CORES = (
    Way("tiny", prompts=8, tokens=24, most_tokens=24, micro_batch_tokens=1024, group_size=4),
    Way("tiny, tail", prompts=8, tokens=16, most_tokens=96, micro_batch_tokens=1024, group_size=4),
)


def ways_on_four(base: Way) -> dict[str, Way]:
    """List configurations of four GPUs that are predicted from `base`, which has two."""
    base = replace(base, gpus=4, prompts=2 * base.prompts)
    return {
        "two and two": replace(base, rollout_gpus=2),
        "in turns on four": replace(base, depth=0, shared=True),
        "three and one": replace(base, rollout_gpus=3),
        "one and three": base,
        "two and two, depth 0": replace(base, rollout_gpus=2, depth=0),
        "two and two, twice the tokens": replace(base, rollout_gpus=2, tokens=2 * base.tokens, most_tokens=2 * base.most_tokens),
        "in turns on four, twice the prompts": replace(base, prompts=2 * base.prompts, depth=0, shared=True),
    }


def ways(base: Way) -> dict[str, Way]:
    """List the configurations that are predicted from `base`: those that differ most from it first."""
    found = {
        "in turns on two": replace(base, depth=0, shared=True),
        "twice the prompts": replace(base, prompts=2 * base.prompts),
        "side by side, depth 0": replace(base, depth=0),
        "in turns on one": replace(base, depth=0, shared=True, gpus=1),
        "in turns on two, twice the prompts": replace(base, prompts=2 * base.prompts, depth=0, shared=True),
        "twice the tokens": replace(base, tokens=2 * base.tokens, most_tokens=2 * base.most_tokens),
        "two steps off": replace(base, depth=2),
        "depth 0, 4 parts": replace(base, depth=0, chunks=4),
        "engines share a GPU": replace(base, engines_per_gpu=4),
        "quarter of the passes' tokens": replace(base, micro_batch_tokens=base.micro_batch_tokens // 4),
        "twice the group, half the prompts": replace(base, prompts=base.prompts // 2, group_size=2 * base.group_size),
        "one step off, as profiled": base,
    }
    seldom = ("quarter of the passes' tokens", "engines share a GPU", "twice the group, half the prompts")
    without = (*(seldom if base.tail else ()), *(("in turns on one",) if base.model in LARGE else ()))
    return {name: way for name, way in found.items() if name not in without}
