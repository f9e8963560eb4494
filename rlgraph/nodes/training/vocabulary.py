"""Whether a model reads the tokens of its batch as they were written: by the vocabulary of the model that wrote them."""

import functools
from collections.abc import Iterator

from rlgraph.errors import DataError
from rlgraph.graph.nodes import Node
from rlgraph.nodes.examples import Examples
from rlgraph.nodes.stepwise import Stepwise

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
    from rlgraph.engines.hf_models.model_files import check_tokenizer
    from rlgraph.engines.hf_models.pretrained import check_model

    try:
        known, own = ({place: text for text, place in check_tokenizer(path).get_vocab().items()} for path in (first, second))
    except DataError:
        return None
    other = next((place for place in sorted(known.keys() & own.keys()) if known[place] != own[place]), None)
    if other is not None:
        return f"token {other} is {known[other]!r} there and {own[other]!r} here"
    size = check_model(second).vocab_size
    return f"it goes up to token {max(known)}, the model up to {size - 1}" if max(known) >= size else None
