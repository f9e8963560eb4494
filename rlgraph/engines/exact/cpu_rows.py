"""Rows of a product on a CPU: oneDNN sums one row alone in another order than a row among several, so one is computed as two.

Seen with 1,536 and 3,072 summands, not with 1,024. Else the last response of a batch would depend on the others having ended.
"""

from collections.abc import Callable

import torch


def in_company(product: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """Compute a `product` of states [..., K], with a second row beside one that is alone.

    >>> in_company(lambda states: states * len(states), torch.ones(1, 3))
    tensor([[2., 2., 2.]])
    """
    if states.numel() > states.shape[-1]:
        return product(states)
    flat = states.reshape(1, -1)
    return product(torch.cat([flat, flat]))[:1].view(*states.shape[:-1], -1)
