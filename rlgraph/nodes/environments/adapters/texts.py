"""How actions are read in what a model has said, and how observations are shown to it: what the adapters share."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rlgraph.nodes.environments.messages import Message

Act: TypeAlias = Callable[[Message], Any]  # raises ValueError, which the model reads, where there is no action
Show: TypeAlias = Callable[[Any], str]


def shown_value(value: Any) -> str:
    """Write an observation as text: text as it is, a mapping with one value as that value, and others as JSON.

    >>> shown_value("Go on."), shown_value({"message": "Go on."}), shown_value({"row": 1, "column": [2, 3]})
    ('Go on.', 'Go on.', '{"row": 1, "column": [2, 3]}')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        return shown_value(next(iter(value.values())))
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Convert an array or a number of numpy."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
