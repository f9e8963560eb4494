"""The process that compares mathematical answers. Each input line is a JSON pair (response, right answer). Each output line is a JSON pair
too: whether they are equal, and the answer found in the response.

It is run by its path, so that it loads `math-verify` without this library.
"""

import importlib
import json
import logging
import resource
import sys
from typing import Any

MEMORY_BYTES = 4 * 2**30
CHARACTERS = 1000  # of an answer


def main() -> None:
    """Answer until the other end of the pipe is closed."""
    import math_verify

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)  # it warns that its own time limit is off; the parent process keeps one
    for line in sys.stdin:
        response, answer = json.loads(line)
        right = math_verify.parse(answer if "$" in answer or "\\" in answer else f"${answer}$", parsing_timeout=None)
        found = math_verify.parse(response, parsing_timeout=None)
        equal = bool(math_verify.verify(right, found, timeout_seconds=None))
        print(json.dumps([equal, canonical_text(right if equal else found)]), flush=True)


def canonical_text(parsed: list[Any]) -> str:
    """Write a parsed answer, equally for `0.5` and `1/2`; empty if there is none. Equal answers of other forms may differ."""
    sympy: Any = importlib.import_module("sympy")  # which has no types

    if not parsed:
        return ""
    try:
        first = sympy.nsimplify(parsed[0], rational=True) if isinstance(parsed[0], sympy.Float) else parsed[0]
        return str(first)[:CHARACTERS]
    except Exception:  # noqa: BLE001 (of sympy, for a number with too many digits: the extracted text)
        return str(parsed[-1])[:CHARACTERS] if isinstance(parsed[-1], str) else ""


if __name__ == "__main__":
    main()
