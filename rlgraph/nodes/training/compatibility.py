"""Settings of a trained model that exclude each other: exact log-probs, adapters, low bits, router replay, other vocabularies."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlgraph.columns import Columns, rows_of
from rlgraph.engines.hf.pretrained import ModelSummary
from rlgraph.engines.precision import INSTALL, is_installed
from rlgraph.errors import CertificateError, DataError, GraphError
from rlgraph.graph.nodes import Node, Output
from rlgraph.graph.rules import EXACT_DTYPES
from rlgraph.nodes.base import list_columns, tensor_of
from rlgraph.nodes.examples import Examples, Stepwise
from rlgraph.nodes.rollout.decode_loop import ROUTES, check_routes
from rlgraph.plan.model_shapes import PROJECTIONS
from rlgraph.values.lora import ALL_LINEAR, FAMILIES, LoRA
from rlgraph.values.optimizers import Muon

# A policy whose log-probs are the engine's to the bit: what its settings may be, and a check of some rows in each step.

CHECKED = 4  # rows of a step


def check_exact_settings(model: Any) -> None:
    """Raise GraphError for settings that are not proven to be exact."""
    where = f"{type(model).__name__}(exact=True"
    if model.dtype not in EXACT_DTYPES:
        raise GraphError(
            f"{where}, dtype='{model.dtype}'): it is proven in {' and '.join(f'{d} on {p}' for d, p in EXACT_DTYPES.items())}; write "
            f"{' or '.join(f'dtype={d!r}' for d in EXACT_DTYPES)}"
        )
    given = {
        "tensor_parallel": (model.tensor_parallel, 1),
        "context_parallel": (model.context_parallel, 1),
        "expert_parallel": (model.expert_parallel, 1),
        "recompute": (model.recompute, False),
        "fused_head": (model.fused_head, None),
        "compiled": (model.compiled, False),
        "load_balance": (model.load_balance, 0.0),
        "router_replay": (model.router_replay, False),
        "adapter": (model.adapter, None),
    }
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(f"{where}, {name}={value!r}): the two together are not proven to be exact; leave out one")


def columns_to_check(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns that an update reads for its check. Raises GraphError for an exact policy's batch that no engine sampled."""
    if model.exact and "rollout_log_probs" not in list_columns(inputs):
        raise GraphError(
            f"node '{name}' trains a policy with exact=True on a batch that no engine sampled; pass it a rollout, or leave out exact"
        )
    return ("rollout_log_probs",) if model.exact else ()


def checked_rows(engine: Any, batch: Columns, step: int, temperature: float) -> dict[str, float]:
    """Score some rows of a batch before its first update, other ones in each step; give the number of their tokens as a metric.

    Raises CertificateError for a token whose log-prob differs from the engine's in any bit.
    """
    rows = rows_of(batch)
    chosen = torch.arange(step * CHECKED, step * CHECKED + min(CHECKED, rows)) % rows
    some = {name: tensor_of(batch, name)[chosen] for name in ("prompts", "prompt_mask", "responses", "response_mask")}
    sampled, mask = tensor_of(batch, "rollout_log_probs")[chosen], some["response_mask"].bool()
    own = engine.scores(some, temperature=temperature)
    differ = (own != sampled) & mask
    if bool(differ.any()):
        most = (own - sampled)[mask].abs().max().item()
        raise CertificateError(
            f"step {step}: {int(differ.sum())} of {int(mask.sum())} tokens of {len(chosen)} rows have other log-probs in the trainer than "
            f"in the engine, by up to {most:.1e}; Policy(exact=True) says that all are equal. Leave out exact to go on without that promise"
        )
    return {"exact/tokens_checked": float(mask.sum())}


# Checks of a model that is trained with moments of 8 bits, or with a frozen base of 4.


def check_eight_bits(model: Any) -> None:
    """Raise GraphError for settings that moments of 8 bits do not work with."""
    where = f"{type(model).__name__}(optimizer=rg.AdamW(moments='8bit')"
    if model.offload == "moments":
        raise GraphError(f"{where}, offload='moments'): moments in host memory have 32 bits; leave out one")
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices cut them within blocks of moments; use "
            "data_parallel or context_parallel, or leave out moments"
        )
    if model.expert_parallel > 1:
        raise GraphError(
            f"{where}, expert_parallel={model.expert_parallel}): ranks that share experts cut them unlike the blocks of moments; "
            "leave out one"
        )


def check_four_bits(model: Any) -> None:
    """Raise GraphError for settings that a base of 4 bits does not work with."""
    where = f"{type(model).__name__}(adapter=LoRA(base='{model.adapter.base}')"
    if model.compiled:
        raise GraphError(f"{where}, compiled=True): products with matrices of 4 bits are not compiled; leave out compiled")
    for name, ranks in (("data_parallel", model.data_parallel or 1), ("context_parallel", model.context_parallel)):
        if ranks > 1:
            raise GraphError(f"{where}, {name}={ranks}): a base of 4 bits is whole on one rank; leave out one")


def check_installed(model: Any) -> None:
    """Raise GraphError for a model that needs bitsandbytes where it is not installed."""
    eight, four = model.optimizer.moments == "8bit", model.adapter is not None and model.adapter.base is not None
    if (eight or four) and not is_installed():
        given = "optimizer=rg.AdamW(moments='8bit')" if eight else f"adapter=LoRA(base='{model.adapter.base}')"
        raise GraphError(f"{type(model).__name__}({given}): the package bitsandbytes is not installed: {INSTALL}")


# Checks of a model that trains an adapter: of its settings where it is declared, of its folder before anything starts.


def check_adapter(model: Any) -> None:
    """Raise GraphError for settings that an adapter does not work with."""
    where = f"{type(model).__name__}(adapter=LoRA(rank={model.adapter.rank})"
    if isinstance(model.optimizer, Muon):
        raise GraphError(f"{where}, optimizer=rg.optim.Muon()): its step is one of whole matrices, not of their factors; use rg.AdamW(…)")
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices would have to share the adapter's too, which is "
            "not supported; use data_parallel or context_parallel"
        )
    if model.expert_parallel > 1:
        raise GraphError(
            f"{where}, expert_parallel={model.expert_parallel}): mixtures of experts have no adapters here; leave out expert_parallel"
        )
    if model.adapter.base is not None:
        check_four_bits(model)
    if model.load_balance:
        raise GraphError(f"{where}, load_balance={model.load_balance}): routers of experts are frozen; leave out load_balance")


def check_adapter_folder(model: Any, summary: ModelSummary) -> None:
    """Raise GraphError for an adapter of a family without tests, of targets that it lacks, or unlike the folder in which it begins."""
    lora: LoRA = model.adapter
    where = f"{type(model).__name__}({str(summary.path)!r}, adapter=LoRA(…))"
    if summary.model_type not in FAMILIES or summary.nested:
        raise GraphError(
            f"{where}: adapters are tested for {', '.join(FAMILIES)}, and this model is a '{summary.model_type}'; train it without adapter="
        )
    unknown = [] if lora.targets == ALL_LINEAR else [name for name in lora.targets if name not in PROJECTIONS]
    if unknown:
        raise GraphError(f"{where} has the target '{unknown[0]}'; the layers have {list(PROJECTIONS)}")
    if lora.folder is not None:
        there = LoRA.load(lora.folder)
        if (there.rank, there.alpha, _targets(there)) != (lora.rank, lora.alpha, _targets(lora)):
            raise GraphError(
                f"{where} begins in '{lora.folder}', whose rank, alpha and targets are {there.rank}, {there.alpha:g} and "
                f"{_targets(there)}; write adapter=rg.LoRA.load({lora.folder!r})"
            )


def _targets(lora: LoRA) -> list[str]:
    return sorted(PROJECTIONS if lora.targets == ALL_LINEAR else lora.targets)


# A policy that computes with the experts that the engine chose: what its settings may be, and the columns that its nodes read.


def check_replay(model: Any) -> None:
    """Raise GraphError for settings with which routers cannot be told what to choose."""
    if not model.router_replay:
        return
    given = {"compiled": (model.compiled, False), "tensor_parallel": (model.tensor_parallel, 1)}
    given |= {"context_parallel": (model.context_parallel, 1)}
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(
                f"{type(model).__name__}(router_replay=True, {name}={value!r}): routers of layers that are compiled, or that ranks share, "
                f"are not told what to choose; leave out {name}, or router_replay"
            )


def check_replay_folder(model: Any) -> None:
    """Raise GraphError for a model without experts."""
    if model.router_replay:
        check_routes(f"{type(model).__name__}(router_replay=True)", model.path)


def routes_read(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns of routes that a node of a policy reads. Raises GraphError for a batch without them, which nothing could be replayed of.

    Batches of examples have none: of a policy that replays, only a rollout's batch is checked.
    """
    if not model.router_replay:
        return ()
    if not set(ROUTES) <= set(list_columns(inputs)):
        sampled = next((o.node.name for o in inputs if isinstance(o, Output) and o.node.traits.work == "generate"), None)
        fix = f"make the generator of '{sampled}' with routes=True" if sampled else "pass it a rollout of rg.Generator(…, routes=True)"
        raise GraphError(
            f"node '{name}' is of a policy with router_replay=True, and its inputs do not carry the experts that the engine chose; {fix}, "
            "or leave out router_replay"
        )
    return ROUTES


# Whether a model reads the tokens of its batch as they were written: by the vocabulary of the model that wrote them.

WRITTEN = "responses"


def check_vocabulary(node: Node) -> None:
    """Raise DataError if tokens that reach a node were written by a model with other tokens than the node's own.

    Models of one family differ in tokens at the end of their vocabularies that only some of them use, so only ids of both are compared.
    """
    assert node.model is not None
    for writer, path in {source.name: _path(source) for source in writers(node)}.items():
        found = None if path == node.model.path else difference(path, node.model.path)
        if found is not None:
            raise DataError(
                f"node '{node.name}' takes the tokens of '{writer}' by '{node.model.path}', but they are of the vocabulary of "
                f"'{path}': {found}; give models of one vocabulary"
            )


def _path(writer: Node) -> str:
    operation = writer.operation
    return operation.model.path if isinstance(operation, Examples | Stepwise) else writer.model.path  # type: ignore[union-attr]


def writers(node: Node) -> Iterator[Node]:
    """Yield the nodes that wrote the tokens that reach a node."""
    for output in node.inputs:
        if not any(column.removeprefix(output.prefix) == WRITTEN for column in output.columns):
            continue
        source = output.node
        if isinstance(source.operation, Examples | Stepwise) or source.model is not None:
            yield source
        else:
            yield from writers(source)


@functools.cache
def difference(first: str, second: str) -> str | None:
    """Name a token id that two models read differently; None if there is none, or if one of the folders has no tokenizer to tell."""
    from rlgraph.engines.hf.model_files import check_tokenizer
    from rlgraph.engines.hf.pretrained import check_model

    try:
        known, own = ({place: text for text, place in check_tokenizer(path).get_vocab().items()} for path in (first, second))
    except DataError:
        return None
    other = next((place for place in sorted(known.keys() & own.keys()) if known[place] != own[place]), None)
    if other is not None:
        return f"token {other} is {known[other]!r} there and {own[other]!r} here"
    size = check_model(second).vocab_size
    return f"it goes up to token {max(known)}, the model up to {size - 1}" if max(known) >= size else None
