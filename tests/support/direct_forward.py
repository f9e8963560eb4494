"""What tests of graphs beyond policy gradients share: a policy, a graph that runs here, and the model's own forward to compare with."""

from typing import Any

import torch

import rlgraph as rg
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import Context

SUMS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(4) for b in range(4)]


def policy(model: str, **settings: Any) -> rg.Policy:
    return rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32", self_test=False, **settings)


def run(output: Output, steps: int = 1) -> list[dict[str, float]]:
    with rg.compile(rg.Graph("beyond", output), rg.Cluster(cpus=2)).run_here() as job:
        return [dict(step.metrics) for step in job.steps(steps)]


def forward_log_probs(model: str, columns: Any) -> tuple[Any, torch.Tensor]:
    """Compute the log-prob of each response token by the model's own forward, one row after another."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = []
    for row, mask in enumerate(columns["response_mask"]):
        prompt = columns["prompts"][row][columns["prompt_mask"][row]]
        logits = net(input_ids=torch.cat([prompt, columns["responses"][row]])[None]).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(-1, columns["responses"][row][:, None])[:, 0]
        rows.append(torch.where(mask, found, 0.0))
    return net, torch.stack(rows)


def norm_of(net: Any, loss: torch.Tensor) -> float:
    loss.backward()
    return float(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm())


def read_first_batch(source: Output) -> Any:
    return source.node.operation.start(Context())(0, {})
