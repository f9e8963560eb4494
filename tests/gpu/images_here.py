"""What vLLM samples of prompts with images, scored by trainer and transformers in float32, before and after new weights, also of a tower.

`images_here.py FAMILY [--smoke]`, of support/seeing.py, prints "equal". A GPU computes in bfloat16, and is compared on average; `--smoke`
takes host cores and float32, and compares each token.
"""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support import seeing
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.vllm.engine import VllmEngine

SMOKE = "--smoke" in sys.argv
DTYPE = torch.float32 if SMOKE else torch.bfloat16
NEAR, NEAR_HALF = {"atol": 2e-5, "rtol": 2e-5}, 0.08  # nats: at most, and on average, of a small random model
SPACE = {"kv_cache_bytes": 1 << 28} if SMOKE else {"memory": 0.3}


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    off = (found - expected).abs()[mask].mean().item()
    print(f"{what} differ by {off:.6f} nats on average")
    assert off < NEAR_HALF
    if SMOKE:
        torch.testing.assert_close(found, expected, **NEAR)


def main(family: str, folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    seeing.folder_of(family, folder)
    net = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts, shown = ([each for each in column for _ in range(4)] for column in seeing.requests(folder, family))
    engine = VllmEngine(folder, max_model_len=256, dtype=str(DTYPE).removeprefix("torch."), images=2, **SPACE)
    given = {"optimizer": rg.AdamW(lr=1e-2), "device": "cpu" if SMOKE else "cuda", "dtype": DTYPE}
    trainers = [fsdp_engine(PolicyHead(folder), train_vision=vision, **given) for vision in (False, True)]
    calls, encode = list[int](), engine.model().embed_multimodal
    engine.model().embed_multimodal = lambda **given: calls.append(1) or encode(**given)
    with closing(engine), closing(trainers[0]), closing(trainers[1]):
        for step in range(3):
            trainer = trainers[step // 2]
            sampled = engine.generate(prompts, rg.Sampling(max_tokens=24), [step * 100 + row for row in range(len(prompts))], shown)
            assert len(calls) <= len(prompts) * (step + 1), "each image is encoded once, and not in each decode step"
            batch = seeing.rollout_of(folder, family, sampled)
            mask, scores = batch["response_mask"], trainer.scores(batch)
            compare(f"step {step}: vLLM and trainer", scores, batch["rollout_log_probs"], mask)
            if step == 0:
                with torch.no_grad():
                    compare("trainer and transformers", scores, seeing.direct_log_probs(net, folder, batch), mask)
            if step < 2:  # the second one publishes its tower too
                batch["advantages"] = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
                trainers[step].update(batch, WeightedLikelihood())
                engine.load_weights({box.name: box.tensor.detach().to(DTYPE, copy=True) for box in trainers[step].weight_shards()})
    print("equal")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1], Path(scratch) / "model")
