"""Products of matrices on a GPU whose rows do not depend on the number of rows: cuBLAS without its sums in several parts.

That is proven at every start, shape by shape, in milliseconds. Where only a row alone is summed in another order (seen on an H200 for
6,144 -> 2,048), it is computed beside a second one, on both sides.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from rlgraph.engines.precision import in_company
from rlgraph.errors import DataError

COUNTS = (*range(1, 65), *range(72, 520, 8), 129, 255, 257, 511, 600, 777, 1024, 1031, 2048, 4095)  # rows that are tried
ROWS = 4096  # of the product that they are compared with


def forbid_split_sums() -> None:
    """Have this process's cuBLAS sum each number of a product in one piece, in engine and trainer."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


class RowInCompany(torch.nn.Linear):
    """A linear map of a trainer that computes one row as two."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return in_company(super().forward, states)


def shapes_needing_batch(shapes: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """The shapes `(out, into)` of matrices for which one row is summed in another order than several.

    Raises DataError for a shape for which more depends on the number of rows.
    """
    found = {shape: rows_that_differ(*shape) for shape in set(shapes)}
    torch.cuda.empty_cache()
    for (out, into), counts in found.items():
        if counts not in ((), (1,)):
            raise DataError(
                f"exact=True: on {torch.cuda.get_device_name()} matmuls with a matrix of {out} x {into} depend on the number of rows, e.g. "
                f"with {', '.join(map(str, counts[:5]))} rows; leave out exact"
            )
    return {shape for shape, counts in found.items() if counts}


@cache
@torch.no_grad()
def rows_that_differ(out: int, into: int) -> tuple[int, ...]:
    """The numbers of rows whose products by a matrix `[out, into]` are not those rows of a larger product."""
    draw = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(out, into, generator=draw, device="cuda", dtype=torch.bfloat16) * 0.02
    states = torch.randn(ROWS, into, generator=draw, device="cuda", dtype=torch.bfloat16)
    whole = linear(states, weight)
    return tuple(count for count in COUNTS if not torch.equal(linear(states[:count], weight), whole[:count]))


def pad_single_rows(model: torch.nn.Module) -> None:
    """Have the linear maps of a trainer's model that need it compute one row as two."""
    # Any module is asked.
    maps = [module for module in model.modules() if type(module) is torch.nn.Linear]
    found = shapes_needing_batch((module.out_features, module.in_features) for module in maps)
    for module in maps:
        if (module.out_features, module.in_features) in found:
            module.__class__ = RowInCompany  # in place, so that parameters keep their names


def exchange_engines_lone_rows(model: Any) -> None:
    """Have the linear maps and the head of vLLM's model that need it compute one row as two."""
    # Any module is asked.
    maps = [module for module in model.modules() if hasattr(module, "quant_method") and getattr(module, "weight", None) is not None]
    found = shapes_needing_batch(tuple(module.weight.shape) for module in maps)
    for module in maps:
        if tuple(module.weight.shape) in found:
            module.quant_method.apply = _in_company(module.quant_method.apply)


def _in_company(of_layer: Any) -> Any:
    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return in_company(lambda rows: of_layer(layer, rows, bias), x)

    return apply
