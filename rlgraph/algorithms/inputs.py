"""Check what comes into the algorithms: options when an object is made, columns once when it is called."""

from collections.abc import Collection

import torch

from rlgraph.columns import COLUMNS, Columns
from rlgraph.errors import DataError, GraphError, show_value


def check_number(
    where: str, name: str, value: object, *, least: float = float("-inf"), above: float = float("-inf"), most: float = float("inf")
) -> None:
    """Raise GraphError unless the value is a finite number with `above` < value, and `least` <= value <= `most`."""
    rule = f"{name} is a finite number" + (f" above {above:g}" if above > float("-inf") else "")
    rule += (f" of at least {least:g}" if least > float("-inf") else "") + (f" and at most {most:g}" if most < float("inf") else "")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise GraphError(f"{where}({name}={show_value(value)}): {rule}; pass such a number")
    if not (value >= least and value > above and value <= most):
        raise GraphError(f"{where}({name}={show_value(value)}): {rule}; pass such a number")


def check_whole(where: str, name: str, value: object, least: int) -> None:
    """Raise GraphError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GraphError(f"{where}({name}={show_value(value)}): {name} is a whole number of at least {least}; pass such a number")


def check_choice(where: str, name: str, value: object, choices: Collection[object]) -> None:
    """Raise GraphError unless the value is one of the choices."""
    if not isinstance(value, str | int | None) or value not in choices:
        raise GraphError(f"{where}({name}={show_value(value)}): {name} is one of {list(choices)}; choose one of them")


def response_mask_of(where: str, batch: Columns, shape: torch.Size | None = None) -> torch.Tensor:
    """Look up the response mask `[B, T]` of a batch and check it.

    Raises DataError if it is missing, is not a bool tensor, or has another shape than the log-probs (`shape`).
    """
    mask = tensor(where, batch, "response_mask")
    check_mask(where, mask)
    if shape is not None and mask.shape != shape:
        raise DataError(f"{where}: the log-probs have shape {list(shape)}, 'response_mask' {list(mask.shape)}; both are [B, T]")
    return mask


def check_mask(where: str, mask: torch.Tensor) -> None:
    """Raise DataError unless the mask is bool and `[B, T]`, with T of 1 or more."""
    if mask.dtype is not torch.bool or mask.ndim != 2 or not mask.shape[1]:
        raise DataError(
            f"{where}: 'response_mask' is {mask.dtype} of shape {list(mask.shape)}; a mask is bool and [B, T]: pass mask.bool()"
        )


def check_tokens(where: str, mask: torch.Tensor, **columns: torch.Tensor) -> None:
    """Raise DataError unless the mask is bool and `[B, T]`, and the columns hold floating-point numbers of its shape."""
    check_mask(where, mask)
    for name in columns:
        tokenwise(where, columns, name, mask)


def tokenwise(where: str, batch: Columns, name: str, mask: torch.Tensor) -> torch.Tensor:
    """Look up a floating-point column with one number per token, of the mask's shape `[B, T]`. Raises DataError for any other."""
    column = tensor(where, batch, name)
    if not column.is_floating_point() or column.shape != mask.shape:
        raise DataError(
            f"{where}: column '{name}' is {column.dtype} of shape {list(column.shape)}; with a mask of shape {list(mask.shape)} "
            "it holds floating-point numbers of the same shape [B, T]"
        )
    return column


def rowwise(where: str, batch: Columns, name: str, mask: torch.Tensor) -> torch.Tensor:
    """Look up a floating-point column `[B]`, one number per response. Raises DataError for any other."""
    column = tensor(where, batch, name)
    if not column.is_floating_point() or column.shape != mask.shape[:1]:
        raise DataError(
            f"{where}: column '{name}' is {column.dtype} of shape {list(column.shape)}; for {mask.shape[0]} responses it holds "
            f"{mask.shape[0]} floating-point numbers, one per response"
        )
    return column


def reasons(where: str, batch: Columns, mask: torch.Tensor) -> torch.Tensor:
    """Look up `finish_reasons` `[B]`. Raises DataError unless it is int8 with one entry per row of the mask."""
    column = tensor(where, batch, "finish_reasons")
    if column.dtype is not torch.int8 or column.shape != mask.shape[:1]:
        raise DataError(
            f"{where}: column 'finish_reasons' is {column.dtype} of shape {list(column.shape)}; for {mask.shape[0]} responses it is int8 "
            f"of shape [{mask.shape[0]}]"
        )
    return column


def tensor(where: str, batch: Columns, name: str) -> torch.Tensor:
    """Look up a column of numbers. Raises DataError if it is missing or holds text."""
    column = batch.get(name)
    if not isinstance(column, torch.Tensor):
        writer = f"; it is written by '{COLUMNS[name].written_by}'" if name in COLUMNS else ""
        found = "missing" if column is None else f"a {type(column).__name__}"
        raise DataError(f"{where}: column '{name}' is {found} among {sorted(batch)}; it must be a tensor{writer}")
    return column
