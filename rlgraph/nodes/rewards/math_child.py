"""The process that compares mathematical answers. Each line in is a JSON pair (response, right answer), each line out true or false.

It is run by its path, so that it loads `math-verify` and nothing of this library.
"""

import json
import logging
import resource
import sys

MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Answer until the other end of the pipe is closed."""
    import math_verify

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)  # it warns that its own time limit is off; the parent process keeps one
    for line in sys.stdin:
        response, answer = json.loads(line)
        right = math_verify.parse(answer if "$" in answer or "\\" in answer else f"${answer}$", parsing_timeout=None)
        equal = math_verify.verify(right, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None)
        print(json.dumps(bool(equal)), flush=True)


if __name__ == "__main__":
    main()
