"""A tiny model, batches for it, and a loss: what tests of engines train and sample."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlgraph.algorithms.masks import Totals
from rlgraph.columns import Columns
from rlgraph.engines.hf.pretrained import byte_tokenizer, tiny_model

VOCAB = 288
LENGTHS = [7, 2, 5, 5, 1, 12]  # three prompts: of two ranks one has a pass without rows
VLLM_PROMPTS = [[5, 6, 7], list(range(1, 41)), list(range(1, 41)), [9, 10, 11, 12, 13], [5, 6, 7]]  # two share a block of 32
UPDATES = 3


def tiny_llama(folder: Path, *, tied: bool = True) -> Path:
    """Return a folder with the tiny model; its weights are always the same."""
    return tiny_model(folder / ("tied" if tied else "untied"), vocab=VOCAB, tied=tied)


def tiny_qwen(
    folder: Path, kind: str, *, vocab: int = 300, heads: int = 4, key_heads: int = 2, head: int = 32, layers: int = 2, name: str = ""
) -> Path:
    """Return a folder with a small random "qwen2" (biases), "qwen3" (norms of heads) or "llama", with a tied vocabulary that is padded."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    config, model = kinds[kind]
    shape = config(
        vocab_size=vocab,
        hidden_size=heads * head,
        intermediate_size=2 * heads * head,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    place = folder / (name or kind)
    model(shape).to(torch.bfloat16).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def tiny_mixture(folder: Path, kind: str = "qwen3_moe", **settings: Any) -> Path:
    """Make a folder with a small random mixture of four experts, two of which a token takes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,  # of an expert, unless the kind has a size for it
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    given |= {"moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32} if kind == "qwen3_moe" else {}
    given |= settings
    if kind == "mixtral":
        given["num_local_experts"] = given.pop("num_experts")
    shape = AutoConfig.for_model(kind, **given)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_moe(folder: Path, *, vocab: int = VOCAB, experts: int = 8, layers: int = 2) -> Path:
    """Return a folder with a small random Qwen 3 MoE of eight experts, of whom two are chosen for a token."""
    more = {"num_experts": experts, "num_hidden_layers": layers, "norm_topk_prob": True, "max_position_embeddings": 1024}
    return tiny_mixture(folder / "moe", vocab_size=vocab, moe_intermediate_size=32, **more)


def batch_of(lengths: list[int], *, group: int = 2, holes: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch with responses of these lengths, `group` of them for each prompt, and advantages.

    With holes every third token of a response is a tool's.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, width, prompt = len(lengths), max(lengths), 9
    prompts = torch.randint(1, VOCAB, (rows // group, prompt), generator=draw)
    prompt_mask = torch.arange(prompt)[None] >= torch.randint(0, 5, (rows // group, 1), generator=draw)
    responses = torch.randint(1, VOCAB, (rows, width), generator=draw)
    response_mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    responses = responses * response_mask
    if holes:
        response_mask = response_mask & (torch.arange(width)[None] % 3 != 1)
    return {
        "prompts": (prompts * prompt_mask).repeat_interleave(group, 0),
        "prompt_mask": prompt_mask.repeat_interleave(group, 0),
        "responses": responses,
        "response_mask": response_mask,
        "advantages": torch.randn(rows, 1, generator=draw).expand(rows, width).contiguous(),
    }


def returns_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with old values and returns for the critic to learn."""
    draw = torch.Generator().manual_seed(5)
    shape = batch["responses"].shape
    return batch | {"values": 0.1 * torch.randn(shape, generator=draw), "returns": torch.randn(shape, generator=draw)}


class WeightedLikelihood:
    """Minus the advantage-weighted mean log-prob, plus `entropy` times the mean entropy: a loss in closed form."""

    reads = ("advantages",)

    def __init__(self, entropy: float = 0.0) -> None:
        self.entropy, self.needs_entropy = entropy, entropy != 0

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        mask, advantages = batch["response_mask"], batch["advantages"]
        assert isinstance(mask, torch.Tensor)
        assert isinstance(advantages, torch.Tensor)
        terms = -log_probs * advantages
        if entropy is not None:
            terms = terms + self.entropy * entropy
        loss = torch.where(mask, terms, 0).sum() / totals.tokens
        return loss, {"actor/tokens": mask.sum().item() / totals.tokens}


def other_weights(weights: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return clearly other weights, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=draw) for name, tensor in weights.items()}
