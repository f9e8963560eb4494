"""Statistics of groups, that is of rows with the same group id, in any order, by index operations alone."""

from dataclasses import dataclass

import torch

from rlgraph.algorithms.inputs import tensor
from rlgraph.columns import Columns
from rlgraph.errors import DataError


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a batch: `index` `[B]` is the group of each row, counted from 0, and `sizes` `[G]` the number of rows of each group."""

    index: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> "Groups":
        """Find the groups of `group_ids` `[B]`; rows with equal ids are one group.

        >>> Groups.of(torch.tensor([7, 7, 3])).sizes
        tensor([1, 2])
        """
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    @property
    def singleton(self) -> torch.Tensor:
        """The rows `[B]` that are alone in their group, as flags."""
        return (self.sizes == 1)[self.index]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values `[B, ...]` by group, to `[G, ...]`."""
        return values.new_zeros((len(self.sizes), *values.shape[1:])).index_add_(0, self.index, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average values `[B]` by group, to `[G]`."""
        return self.sum(values) / self.sizes

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Take the largest of the values `[B]` of each group, `[G]`."""
        return self._extreme(values, "amax")

    def min(self, values: torch.Tensor) -> torch.Tensor:
        """Take the smallest of the values `[B]` of each group, `[G]`."""
        return self._extreme(values, "amin")

    def _extreme(self, values: torch.Tensor, reduce: str) -> torch.Tensor:
        return values.new_zeros(len(self.sizes)).scatter_reduce_(0, self.index, values, reduce, include_self=False)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Subtract the mean of its group from each value `[B]`, in float64: exactly 0 in a group of equal values."""
        # Subtracting a member of the group first keeps the rounding error of the mean out of groups of equal values.
        shifted = values.double() - self.min(values).double()[self.index]
        return shifted - self.mean(shifted)[self.index]

    def std(self, centered: torch.Tensor) -> torch.Tensor:
        """Compute the unbiased standard deviation `[B]` of each row's group from centered values; 1 for a row that is alone."""
        variance = self.sum(centered.square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.sizes > 1, variance.sqrt(), 1.0)[self.index]


def groups_of(where: str, batch: Columns, mask: torch.Tensor) -> Groups:
    """Find the groups of a batch by its `group_ids`. Raises DataError unless these are int64 `[B]`."""
    ids = tensor(where, batch, "group_ids")
    if ids.dtype is not torch.int64 or ids.shape != mask.shape[:1]:
        raise DataError(
            f"{where}: column 'group_ids' is {ids.dtype} of shape {list(ids.shape)}; for {mask.shape[0]} responses it holds "
            f"{mask.shape[0]} int64 ids, equal for the responses of one prompt"
        )
    return Groups.of(ids)
