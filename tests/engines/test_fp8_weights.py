"""Weights in fp8: rows, versions written into an engine's own tensors, and what a plan says of such an engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rlgraph as rg
from rlgraph.engines.lora import A, B, BaseWeights
from rlgraph.engines.vllm.weights import QuantisedWeights, quantise, quantised_bytes
from rlgraph.errors import PlanError

HIDDEN, HEADS, KEYS, WIDE = 256, 256, 128, 384
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_each_row_has_the_precision_of_its_own_largest_number() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(30, 200) * torch.logspace(-3, 3, 30)[:, None]
    matrix[7] = 0
    numbers, scales = quantise(matrix)
    back = numbers.float() * scales
    assert numbers.shape == matrix.shape
    assert scales.shape == (30, 1)
    # Half a step of 3 bits of mantissa, and of the smallest numbers half of the least one.
    assert bool(((back - matrix).abs() <= torch.maximum(matrix.abs() / 16, scales * 2**-10) * 1.001).all())


class Layer(torch.nn.Module):
    """A fused projection as vLLM keeps it."""

    def __init__(self, widths: list[int], into: int) -> None:
        super().__init__()
        self.logical_widths, self.input_size_per_partition = widths, into
        self.weight = torch.nn.Parameter(torch.zeros(sum(widths), into).to(torch.float8_e4m3fn).t(), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.zeros(sum(widths), 1), requires_grad=False)


class Model(torch.nn.Module):
    """A model with one layer under vLLM's names."""

    packed_modules_mapping = FUSED

    def __init__(self) -> None:
        super().__init__()
        attention, mlp, layer, self.model = (torch.nn.Module() for _ in range(4))
        attention.qkv_proj, attention.o_proj = Layer([HEADS, KEYS, KEYS], HIDDEN), Layer([HIDDEN], HEADS)
        attention.qkv_proj.bias = torch.nn.Parameter(torch.zeros(HEADS + 2 * KEYS))
        mlp.gate_up_proj, mlp.down_proj = Layer([WIDE, WIDE], HIDDEN), Layer([HIDDEN], WIDE)
        layer.self_attn, layer.mlp = attention, mlp
        layer.input_layernorm, layer.post_attention_layernorm = (torch.nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))
        self.model.layers = torch.nn.ModuleList([layer])
        self.model.embed_tokens = torch.nn.Embedding(320, HIDDEN)
        self.model.norm = torch.nn.LayerNorm(HIDDEN, bias=False)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    sides = {"q": (HEADS, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "o": (HIDDEN, HEADS)}
    layers = {f"self_attn.{name}_proj": shape for name, shape in sides.items()}
    layers |= {"mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}
    found = {"model.embed_tokens.weight": torch.randn(300, HIDDEN)}  # vLLM pads the vocabulary
    found |= {f"model.layers.0.{name}.weight": torch.randn(shape) * (1 + row) for row, (name, shape) in enumerate(layers.items())}
    found |= {f"model.layers.0.self_attn.{name}_proj.bias": torch.randn(sides[name][0]) for name in "qkv"}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    return found | {f"model.{name}.weight": torch.randn(HIDDEN) for name in norms}


def held(model: Model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}


def test_a_version_is_quantised_into_the_tensors_that_the_engine_has() -> None:
    model = Model()
    at = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    loader = QuantisedWeights(model)
    for seed in (1, 2):
        new = weights(seed)
        loader.load(new)
        layer, own = "model.layers.0.", held(model)
        fused = torch.cat([new[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"])
        numbers, scales = quantise(fused)
        assert torch.equal(own[f"{layer}self_attn.qkv_proj.weight"].t(), numbers.float())
        assert torch.equal(own[f"{layer}self_attn.qkv_proj.weight_scale"], scales)
        assert torch.equal(own[f"{layer}mlp.down_proj.weight"].t(), quantise(new[f"{layer}mlp.down_proj.weight"])[0].float())
        assert torch.equal(own[f"{layer}self_attn.qkv_proj.bias"], torch.cat([new[f"{layer}self_attn.{name}_proj.bias"] for name in "qkv"]))
        assert torch.equal(own["model.embed_tokens.weight"][:300], new["model.embed_tokens.weight"])
        assert torch.equal(own["model.norm.weight"], new["model.norm.weight"])
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == at
    assert len(loader.names) == 7


def test_of_an_adapter_only_what_it_changes_is_quantised_again(tmp_path: Path) -> None:
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": WIDE}
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 1, "vocab_size": 300, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "max_position_embeddings": 64}))
    save_file(weights(1), tmp_path / "model.safetensors")
    base = BaseWeights(tmp_path)
    module = "model.layers.0.self_attn.k_proj"
    adapter = {module + A: torch.randn(4, HIDDEN), module + B: torch.randn(KEYS, 4)}
    model = Model()
    loader = QuantisedWeights(model)
    loader.load(base.with_adapter(adapter, 1.0, torch.float32))
    before = held(model)
    adapter[module + B].mul_(2)
    loader.load(base.with_adapter(adapter, 1.0, torch.float32))
    after = held(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.0.self_attn.qkv_proj.{kind}" for kind in ("weight", "weight_scale")}
    expected = quantise(base[module + ".weight"] + adapter[module + B] @ adapter[module + A])
    rows = slice(HEADS, HEADS + KEYS)
    assert torch.equal(after["model.layers.0.self_attn.qkv_proj.weight"].t()[rows], expected[0].float())


def test_layers_in_another_layout_are_refused_by_name() -> None:
    model = Model()
    model.model.layers[0].mlp.down_proj.weight_scale = torch.nn.Parameter(torch.zeros(7))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"layer 'model.layers.0.mlp.down_proj' holds .* leave out weights_dtype"):
        QuantisedWeights(model)


def test_bytes_are_those_of_the_tensors() -> None:
    loaded = weights(1)
    own = sum(t.numel() * (1 if ".layers." in name and t.dim() == 2 else 2) for name, t in loaded.items())
    assert quantised_bytes({name: tuple(t.shape) for name, t in loaded.items()}, 2) == own


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def planned(folder: Path, cluster: rg.Cluster, *, config: Any = None, **given: Any) -> rg.Plan:
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=512), max_context=1024, **given)
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=4))
    return rg.compile(rg.Graph("planned", rg.reward(length, rollout)), cluster)


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


GPU = rg.Cluster(gpus=1, cpus=8, gpu="H200")


def test_a_plan_counts_fewer_bytes_and_shorter_steps(tmp_path: Path) -> None:
    plans = [planned(tmp_path, GPU, weights_dtype=kind) for kind in (None, "fp8")]
    weights_of = [next(dict(need.parts)["engine's weights"] for need in plan.memory if need.pool == "rollout") for plan in plans]
    layers = 36 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    assert weights_of[0] - weights_of[1] == pytest.approx(layers, rel=0.01)
    assert plans[1].prediction.step_s < 0.7 * plans[0].prediction.step_s


def test_a_plan_counts_keys_and_values_in_fp8(tmp_path: Path) -> None:
    plans = [planned(tmp_path, GPU, engine_args=given) for given in ({}, {"kv_cache_dtype": "fp8"})]
    cache = [next(dict(need.parts)["keys and values"] for need in plan.memory if need.pool == "rollout") for plan in plans]
    assert cache[0] == 2 * cache[1] > 0
    assert plans[1].prediction.step_s < plans[0].prediction.step_s


@pytest.mark.parametrize(
    ("given", "cluster", "says"),
    [
        ({"tensor_parallel": 2}, rg.Cluster(gpus=2, cpus=8, gpu="H200"), "tensor_parallel=2.*on one GPU"),
        ({"dtype": "float32"}, GPU, "dtype='float32'.*bfloat16"),
        ({"config": {"hidden_size": 570}}, GPU, "hidden_size = 570, which is not a multiple of 16"),
        ({"config": {"num_experts": 8, "moe_intermediate_size": 768}}, GPU, "mixture of experts"),
        ({}, rg.Cluster(cpus=8), "runs on the host"),
    ],
)
def test_what_has_no_fp8_weights_is_refused_before_anything_starts(
    tmp_path: Path, given: dict[str, Any], cluster: rg.Cluster, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        planned(tmp_path, cluster, weights_dtype="fp8", **given)


def test_other_engines_have_no_such_setting() -> None:
    with pytest.raises(rg.errors.GraphError, match=r"weights_dtype='fp8'.*'transformers' has no such setting"):
        rg.Generator("tiny", pool=rg.Pool("rollout"), engine="transformers", weights_dtype="fp8")


def test_the_loader_takes_one_matrix_that_is_fused_in_the_folder_too() -> None:
    norm, layer = torch.nn.Parameter(torch.zeros(HIDDEN)), Layer([HEADS, KEYS, KEYS], HIDDEN)
    model = SimpleNamespace(packed_modules_mapping={"qkv_proj": ["qkv_proj"]}, named_parameters=lambda: [("norm.weight", norm)])
    model.named_modules = lambda: [("layers.0.qkv_proj", layer)]
    whole = torch.randn(HEADS + 2 * KEYS, HIDDEN)
    QuantisedWeights(model).load({"layers.0.qkv_proj.weight": whole, "norm.weight": torch.ones(HIDDEN)})
    assert torch.equal(layer.weight.t().float(), quantise(whole)[0].float())
