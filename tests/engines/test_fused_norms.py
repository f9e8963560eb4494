"""Norms as one kernel compute what the model's own code computes, forwards and backwards, and only those of that form are changed."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlgraph.engines.hf import backbone


def passed(model: torch.nn.Module, fused: bool) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """Return how many norms were fused, the logits of some tokens, and the gradients of their sum of squares."""
    count = backbone.install_fused_norms(model) if fused else 0
    model.zero_grad()
    logits = model(input_ids=torch.arange(1, 13).view(2, 6)).logits
    (logits**2).sum().backward()
    return count, logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_model_with_fused_norms_gives_the_same_numbers_and_gradients(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    _, plain, slopes = passed(loaded, fused=False)
    count, fused, others = passed(loaded, fused=True)
    norms = sum("norm" in name for name, _ in loaded.named_parameters())
    assert count == norms > 2
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    for name, slope in slopes.items():
        torch.testing.assert_close(others[name], slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))


class OneMore(torch.nn.Module):
    """A norm that multiplies by one more than its weight, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (8,), 1 + self.weight, self.variance_epsilon)


def test_norms_of_another_form_are_left_alone() -> None:
    assert backbone.install_fused_norms(torch.nn.Sequential(OneMore(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))) == 0
