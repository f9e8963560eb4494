"""What a device's roofline leaves out, measured on H200s: the host's time for each decode step and pass, what logits take, and the share
of the peak that compiled layers reach.

`benchmarks/a_priori.py --fit` derives the numbers from the results named here, and prints the errors on the results that were held out.
"""

from dataclasses import dataclass

from rlgraph.costs.model_shapes import ModelShape
from rlgraph.graph.operation import ModelTraits


@dataclass(frozen=True)
class HostTime:
    """One number of the table, and the results in `benchmarks/results/` that it was fitted to."""

    value: float
    source: str


# Between two decode steps an engine schedules, samples and passes tokens on; no other work overlaps that.
DECODE_STEP_S = HostTime(1.18e-3, "prediction_h200.json: costs, 1.7B and 4B; rollout_h200.json: batch by batch, SmolLM2")
# Of each sequence in a step: its logits, its log-prob, its place in the scheduler's lists.
DECODE_SEQUENCE_S = HostTime(13.3e-6, "prediction_h200.json: costs, 1.7B and 4B; rollout_h200.json: batch by batch, SmolLM2")
# Factor on both for each doubling of the engines that share a GPU.
SHARING = HostTime(1.36, "peer_job_h200.json: one_step_off, four engines a GPU")
# The host's time to launch a pass forward and backward, for each layer; more if ranks gather and scatter the layer's shards.
PASS_LAYER_S = HostTime(7.75e-3, "prediction_h200.json: costs, pass_s of 1.7B and 4B over their layers")
SHARDED_PASS_LAYER_S = HostTime(15e-3, "prediction_h200.json: costs, sharded_pass_s of 1.7B and 4B over their layers")
# The host's time of a layer with experts over that of a dense one, by the operations it launches: about 1,300 in a layer and pass that
# computes again (43,026 in four passes of 8 layers, ep 2), and about 650.
EXPERTS_LAYER = HostTime(2.0, "operations in profiles of 30B-A3B-8 and 4B by parallel.py --profile; fitted to no seconds")
# The same of a layer that is compiled: about 250 (18,160 in two passes of 36 layers, dp 2), and about 650.
COMPILED_LAYER = HostTime(0.39, "operations in profiles of 8B, compiled, and 4B by parallel.py --profile; fitted to no seconds")
# Share of a GPU's peak that compiled layers reach on one rank, and the bytes of memory traffic of a logit beside them, or of a fused head.
COMPILED_TRAINING = HostTime(0.562, "training_flash4_h200.json: updates of 1.7B and 4B")
FUSED_LOGIT_BYTES = HostTime(26.8, "training_flash4_h200.json: updates of 1.7B and 4B")
# Bytes of memory traffic for each logit of a token that is trained, where neither layers are compiled nor the head is fused: float32
# softmax, its gradient, temperature, entropy.
LOGIT_BYTES = HostTime(220.0, "prediction_h200.json: costs, token_s of 1.7B and 4B; peer_job_h200.json: one_step_off")
# Bytes a second between a GPU and pinned memory of its host, over the link's: 15 to 43 GB/s of 63.
COPYING = HostTime(0.425, "prediction_h200.json: costs, sleep of 1.7B and 4B")
# The same of moments on the host at an optimizer step, over the link's one way: those of one parameter leave while others come.
MOMENTS_COPYING = HostTime(0.882, "small_gpu_h200.json: moments, 4B")
# Bytes of memory traffic for each number of a matrix that an adapter is merged into: its base, the product in float32, the engine's own.
MERGED_BYTES = HostTime(54.6, "small_gpu_h200.json: lora_publish, 8B")


def launch_s(shape: ModelShape, traits: ModelTraits, *, trains: bool = True, sharded: bool = False) -> float:
    """Estimate the host's time to launch a pass forward and backward. Layers that compute again are launched forward a second time.

    In a sharded pass that time was not seen: the host gathers the layer's shards meanwhile. Compiled layers whose matrices are shared are
    launched in as many parts as others.

    >>> sizes = {"hidden": 2560, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 9728, "vocab": 151936}
    >>> [round(launch_s(ModelShape(layers=36, **sizes), ModelTraits(**way)), 3) for way in ({}, {"recompute": True}, {"compiled": True})]
    [0.279, 0.372, 0.109]
    """
    layers = shape.layers * (EXPERTS_LAYER.value if shape.experts > 1 else 1)
    if trains and traits.compiled and traits.tensor_parallel == 1:
        layers *= COMPILED_LAYER.value
    if sharded:
        return layers * SHARDED_PASS_LAYER_S.value
    return layers * PASS_LAYER_S.value * (4 / 3 if trains and traits.recompute else 1)
