"""What vLLM samples of prompts with images, scored by a trainer and by transformers, before and after new weights.

`sampled_images.py FAMILY`, of support/seeing.py, prints "equal".
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
from rlgraph.nodes.rollout.decode_loop import columns_of

NEAR = {"atol": 2e-5, "rtol": 2e-5}


def main(family: str, folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    seeing.folder_of(family, folder)
    net = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts, shown, urls = seeing.requests(folder, family)
    engine = VllmEngine(folder, max_model_len=256, dtype="float32", images=2, kv_cache_bytes=1 << 28)
    trainer = fsdp_engine(PolicyHead(folder), optimizer=rg.AdamW(lr=1e-2), dtype=torch.float32)
    calls, encode = list[int](), engine.model().embed_multimodal
    engine.model().embed_multimodal = lambda **given: calls.append(1) or encode(**given)
    with closing(engine), closing(trainer):
        for step in range(2):
            sampled = engine.generate(prompts, rg.Sampling(max_tokens=24), [step * 100 + row for row in range(len(prompts))], shown)
            assert len(calls) <= len(urls) * (step + 1), "each image is encoded once, and not in each decode step"
            batch = columns_of(prompts, sampled, torch.arange(len(prompts))) | {"images": urls}
            torch.testing.assert_close(trainer.scores(batch), batch["rollout_log_probs"], **NEAR)
            if step == 0:
                with torch.no_grad():
                    torch.testing.assert_close(trainer.scores(batch), seeing.direct_log_probs(net, folder, batch), **NEAR)
                batch["advantages"] = torch.randn(batch["response_mask"].shape, generator=torch.Generator().manual_seed(0))
                trainer.update(batch, WeightedLikelihood())
                engine.load_weights({box.name: box.tensor.detach().clone() for box in trainer.weight_shards()})
    print("equal")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1], Path(scratch) / "model")
