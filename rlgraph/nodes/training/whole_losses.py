"""Turn a loss of a whole mini-batch into one that any split into passes and ranks can take."""

from typing import Any

import torch

from rlgraph.algorithms.whole_loss import GRADIENTS, SlopedLoss, WholeLoss
from rlgraph.columns import Columns
from rlgraph.nodes.base import tensor_of


def prepared(engine: Any, batch: Columns, loss: Any, temperature: float) -> tuple[Columns, Any]:
    """Take the slopes of a `WholeLoss` in the scores of its mini-batch; pass any other loss through.

    Rows without a slope, such as pairs without a winner, leave the mask: the passes with gradients need not compute them.
    """
    if not isinstance(loss, WholeLoss):
        return batch, loss
    with torch.enable_grad():
        scores = engine.scores(batch, temperature=temperature).requires_grad_()
        value, metrics = loss(scores, batch)
        (slopes,) = torch.autograd.grad(value, scores)
    mask = tensor_of(batch, "response_mask")
    learns = mask & (slopes != 0).any(-1, keepdim=True)
    made = {**batch, GRADIENTS: slopes, "response_mask": learns if bool(learns.any()) else mask}
    return made, SlopedLoss(value=float(value.detach()), metrics=metrics)
