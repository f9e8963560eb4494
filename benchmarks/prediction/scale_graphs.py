"""The models and the graphs that `scale.py` rehearses: shapes alone, no weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import rlgraph as rg
from rlgraph.plan.lengths import PROBABILITIES
from rlgraph.plan.model_shapes import ModelShape, shapes_of
from rlgraph.plan.roofline import DEVICES, priced_for

CORES, LINK = 16, 50e9  # of a host for each GPU: cores, and bytes a second each way of a port of 400 Gbit/s
# hidden, layers, heads, key-value heads, intermediate (of an expert), vocabulary, experts, experts of a token
SHAPES: Mapping[str, tuple[int, int, int, int, int, int, int, int]] = {
    "8B": (4096, 36, 32, 8, 12288, 151936, 1, 1),  # Qwen3
    "Llama 8B": (4096, 32, 32, 8, 14336, 128256, 1, 1),
    "32B": (5120, 64, 64, 8, 25600, 151936, 1, 1),
    "30B-A3B": (2048, 48, 32, 4, 768, 151936, 128, 8),
    "235B-A22B": (4096, 94, 64, 4, 1536, 151936, 128, 8),
    "1T-A32B": (7168, 61, 64, 8, 2048, 163840, 384, 8),  # as Kimi-K2, but with plain attention of 8 key-value heads
}


def shape(name: str) -> ModelShape:
    found = ModelShape.from_config(config(name))
    assert found is not None
    return found


def config(name: str) -> dict[str, Any]:
    """Make the config.json of a shape."""
    hidden, layers, heads, kv_heads, intermediate, vocab, experts, used = SHAPES[name]
    mixed = {"num_experts": experts, "num_experts_per_tok": used, "moe_intermediate_size": intermediate} if experts > 1 else {}
    return {
        "architectures": ["Qwen3MoeForCausalLM" if mixed else "Qwen3ForCausalLM"], "model_type": "qwen3_moe" if mixed else "qwen3",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 128, "intermediate_size": intermediate, "vocab_size": vocab, "tie_word_embeddings": False, **mixed,
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A graph on a cluster: `rollout` and `train` are the GPUs of the two pools, None to let the compiler choose, 0 and 0 to time-share."""

    model: str
    gpus: int
    gpu: str
    prompts: int
    group: int
    most_tokens: int
    mean_tokens: float
    prompt_tokens: float = 256.0
    depth: int = 1
    rollout: int | None = None
    train: int | None = None
    width: int = 1  # GPUs of an engine
    sharing: int = 1  # ranks of the trainer that share the matrices of a layer
    a_host: int = 8  # GPUs that are linked to each other; 64 of a rack with NVLink count as one host
    scores: bool = False  # a pass for the old log-probs
    mini_batches: int = 1
    micro_batch_tokens: int = 16384

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def cluster(self) -> rg.Cluster:
        return rg.Cluster(gpus=self.gpus, cpus=CORES * self.gpus, gpus_per_node=self.a_host, gpu=self.gpu)

    @property
    def link(self) -> float:
        return LINK * self.a_host

    def refused(self, graph: rg.Graph) -> str:
        """Say what of the plan does not fit the memory of its GPUs; empty if all fits. Rehearsals go on without this check."""
        try:
            rg.compile(graph, replace(self.cluster, gpu_memory_bytes=DEVICES[self.gpu].memory_bytes), self.costs(graph))
        except rg.errors.PlanError as error:
            return str(error)
        return ""

    def graph(self, models: Path) -> rg.Graph:
        """Build GRPO in the shape of the case; `models` gets the config.json."""
        folder = models / self.model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(self.model)))
        together = (self.rollout, self.train) == (0, 0)
        generating = rg.Pool("gpus") if together else _pool("rollout", self.rollout)
        training = generating if together else _pool("train", self.train)
        generator = rg.Generator(
            str(folder),
            pool=generating,
            tensor_parallel=self.width,
            sampling=rg.Sampling(max_tokens=self.most_tokens),
        )
        policy = rg.Policy(
            str(folder), pool=training, tensor_parallel=self.sharing, micro_batch_tokens=self.micro_batch_tokens, recompute=True
        )
        weights = rg.feedback("weights", depth=self.depth, buffers=2 if self.depth else 1)
        rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=self.prompts), weights, group_size=self.group)
        advantages = rg.advantages(rollout, rg.reward(nothing, rollout), estimator=rg.GRPO())
        scored = [policy.log_probs(rollout)] if self.scores else []
        step = policy.update(rollout, advantages, *scored, loss=rg.ClippedLoss(), mini_batches=self.mini_batches)
        weights.close(step.weights)
        return rg.Graph(self.model, step.metrics)

    def costs(self, graph: rg.Graph) -> rg.planning.Costs:
        """Estimate the costs from the shape, with lengths of the case's mean: geometric, cut off at the most. A version reaches an engine
        by the links of its GPUs."""
        priced = priced_for(graph, self.cluster, None, shapes_of(graph))
        tokens = lengths(self.mean_tokens, self.most_tokens)
        received_s = (priced.publish_bytes or 0) / (LINK * self.width)
        return replace(priced, lengths=rg.planning.Lengths(PROBABILITIES, tokens, self.prompt_tokens), receive_s=received_s)


def _pool(name: str, gpus: int | None) -> rg.Pool:
    return rg.Pool(name, share=None) if gpus is None else rg.Pool(name, gpus=gpus)


def nothing(responses: list[str]) -> list[float]:
    return [0.0] * len(responses)


def lengths(mean: float, most: int) -> tuple[float, ...]:
    """Find the quantiles of geometric lengths with that mean once they are cut off at `most`."""
    at = np.asarray(PROBABILITIES)
    low, high = 1.0, 20.0 * most
    for _ in range(60):
        scale = math.sqrt(low * high)
        tokens = np.minimum(np.ceil(-np.log(np.maximum(1 - at, 1e-12)) * scale), most)
        low, high = (scale, high) if np.trapezoid(tokens, at) < mean else (low, scale)
    return tuple(map(float, tokens))


def gathers_s(case: Case, train: int, passes: int) -> float:
    """Predict the seconds in which the trainer's ranks gather weights and scatter gradients over the hosts' links in a step.

    Each pass gathers the weights forwards and backwards and scatters gradients, in bfloat16; a rank has its part of its host's link.
    Predictions do not count it: it is hidden where passes compute for longer.
    """
    others = max(1 - case.a_host / train, 0.0)
    return passes * 3 * 2 * shape(case.model).parameters / case.sharing * others / LINK
