"""An engine on a GPU that sleeps until weights are loaded: what it then has, and samples, is that of an engine that saved all of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from tiny import tiny_qwen
from transformers import AutoModelForCausalLM

from rlgraph.engines.api import Sampling
from rlgraph.engines.lora.merging import A, B, BaseWeights
from rlgraph.engines.vllm.engine import VllmEngine

folder = tiny_qwen(Path("model"), "qwen3", head=64)
engine = VllmEngine(folder, max_model_len=512, kv_cache_bytes=256 << 20, max_sequences=16, shared=True)
prompts, sampling = [[5, 6, 7], [8, 9], list(range(10, 150))], Sampling(max_tokens=12, ignore_eos=True)
weights = {name: tensor.cuda() for name, tensor in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict().items()}
weights.pop("lm_head.weight", None)  # tied
base = BaseWeights(folder)


def version(seed: int, merged: bool) -> dict[str, torch.Tensor]:
    drawn = torch.Generator("cuda").manual_seed(seed)
    if not merged:
        noise = {name: torch.randn(tensor.shape, generator=drawn, device="cuda") for name, tensor in weights.items()}
        return {name: tensor + 0.02 * noise[name].bfloat16() for name, tensor in weights.items()}
    adapter = {}
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            module, (out, into) = name.removesuffix(".weight"), tensor.shape
            adapter[module + A] = 0.1 * torch.randn(4, into, generator=drawn, device="cuda")
            adapter[module + B] = 0.1 * torch.randn(out, 4, generator=drawn, device="cuda")
    return base.with_adapter(adapter, 1.0, torch.bfloat16)  # type: ignore[return-value]


def found() -> tuple[list[object], dict[str, torch.Tensor]]:
    responses = engine.generate(prompts, sampling, [1, 2, 3])
    return [(each.tokens, each.log_probs) for each in responses], {n: t.clone() for n, t in engine.model().state_dict().items()}


def taken_meanwhile() -> None:
    """Fill the memory that the engine gave up, as another model would."""
    room = int(torch.cuda.mem_get_info()[0] * 0.9)
    torch.full((room // 4,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


for merged in (False, True, False):
    engine.load_weights(version(0, merged))
    for seed in (1, 2, 3):
        engine.sleep()
        taken_meanwhile()
        engine.wake()
        engine.load_weights(version(seed, merged))
        expected, held = found()
        engine.load_weights(version(9, merged))
        engine.sleep_until_loaded()
        kept = sum(span.size for span in engine._kept._host)
        taken_meanwhile()
        engine.wake()
        engine.load_weights(version(seed, merged))
        again, now = found()
        differ = [name for name, tensor in held.items() if not torch.equal(tensor, now[name])]
        assert not differ, differ
        assert again == expected
        own = sum(tensor.numel() * tensor.itemsize for tensor in engine.model().parameters())
        print(f"{'merged' if merged else 'whole'} weights, version {seed}: {kept} of {own} bytes kept")
        assert kept < own
engine.sleep_until_loaded()
engine.wake()
with pytest.raises(RuntimeError, match="load weights first"):
    engine.generate(prompts, sampling, [1, 2, 3])
engine.load_weights(version(1, False))
engine.sleep()
taken_meanwhile()
engine.wake()
before = found()[0]
assert found()[0] == before
print("equal")
