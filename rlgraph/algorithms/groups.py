"""Statistics of groups: rows with the same group id, in any order, by index operations alone."""

from dataclasses import dataclass

import torch

from rlgraph.algorithms.inputs import tensor
from rlgraph.columns import Columns
from rlgraph.errors import DataError


@dataclass(frozen=True, eq=False)
class Groups:
    """Which group each row belongs to: `index` `[B]` counts groups from 0, `sizes` `[G]` are their rows."""

    index: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> "Groups":
        """Return the groups of `group_ids` `[B]`; only which ids are equal matters."""
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    @property
    def singleton(self) -> torch.Tensor:
        """Rows `[B]` that are alone in their group."""
        return (self.sizes == 1)[self.index]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums `[G, ...]` of the groups of values `[B, ...]`."""
        return values.new_zeros((len(self.sizes), *values.shape[1:])).index_add_(0, self.index, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the means `[G]` of the groups of values `[B]`."""
        return self.sum(values) / self.sizes

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value `[G]` of each group of values `[B]`."""
        return self._extreme(values, "amax")

    def min(self, values: torch.Tensor) -> torch.Tensor:
        """Return the smallest value `[G]` of each group of values `[B]`."""
        return self._extreme(values, "amin")

    def _extreme(self, values: torch.Tensor, reduce: str) -> torch.Tensor:
        return values.new_zeros(len(self.sizes)).scatter_reduce_(0, self.index, values, reduce, include_self=False)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Return values `[B]` in float64 less the mean of their group: exactly 0 in a group of equal values."""
        # Shifting by a member of the group first keeps the rounding of the mean out of groups of equal values.
        shifted = values.double() - self.min(values).double()[self.index]
        return shifted - self.mean(shifted)[self.index]

    def std(self, centered: torch.Tensor) -> torch.Tensor:
        """Return the unbiased standard deviation of each row's group `[B]` from centered values; 1 for a row that is alone."""
        variance = self.sum(centered.square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.sizes > 1, variance.sqrt(), 1.0)[self.index]


def groups_of(where: str, batch: Columns, mask: torch.Tensor) -> Groups:
    """Return the groups of a batch. Raises DataError unless `group_ids` is int64 `[B]`."""
    ids = tensor(where, batch, "group_ids")
    if ids.dtype is not torch.int64 or ids.shape != mask.shape[:1]:
        raise DataError(
            f"{where}: column 'group_ids' is {ids.dtype} of shape {list(ids.shape)}; for {mask.shape[0]} responses it holds "
            f"{mask.shape[0]} int64 ids, equal for the responses of one prompt"
        )
    return Groups.of(ids)
