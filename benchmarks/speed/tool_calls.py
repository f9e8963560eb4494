"""Seconds of a call of the tool `python`, one after another and 32 at once: `python benchmarks/speed/tool_calls.py [out.json]`."""

import asyncio
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

from rlgraph.nodes.sandbox import Limits, check, run

CALLS, AT_ONCE = 100, 32
LIMITS = Limits()


async def alone() -> list[float]:
    """Seconds of each of `CALLS` calls, one after another."""
    found = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        assert await run("1 + 1", LIMITS) == "2\n"
        found.append(time.perf_counter() - begin)
    return found


async def together() -> float:
    """Seconds for `AT_ONCE` calls at once."""
    begin = time.perf_counter()
    await asyncio.gather(*(run("1 + 1", LIMITS) for _ in range(AT_ONCE)))
    return time.perf_counter() - begin


def main() -> None:
    check(LIMITS)
    each = asyncio.run(alone())
    at_once = [asyncio.run(together()) for _ in range(5)]
    result = {
        "calls": CALLS,
        "ms_of_a_call_median": round(statistics.median(each) * 1e3, 2),
        "ms_of_a_call_slowest_of_20": round(statistics.quantiles(each, n=20)[-1] * 1e3, 2),
        "at_once": AT_ONCE,
        "ms_for_each_at_once": round(statistics.median(at_once) / AT_ONCE * 1e3, 2),
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
