"""Malformed input to channels: over a hundred thousand frames, messages, headers and shared memories, from a seed.

    python benchmarks/reliability/fuzz.py [--cases 120000] [--seed 0] [--json PATH]

The sender is a peer that knows the job's key; one without the key gets no further than the handshake. Each case must end in an error
or, if the change left it valid, in data. The longest case shows whether anything hangs; Python's audit hooks show whether any code was
imported, compiled, unpickled or run.
"""

import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rich.progress import track
from support import hostile_peer

from benchmarks.lib.command import command_line, write

SHARES = {
    "handshake": 0.2,
    "tokens and memory to a reader": 0.3,
    "tokens to a writer": 0.1,
    "headers in a slot": 0.25,
    "messages to the driver": 0.15,
}


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("--cases", type=int, default=120_000)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    warnings.simplefilter("error")
    watch, figures = hostile_peer.Watch(), {}
    for name, share in SHARES.items():
        hostile_peer.attack(name, 20, given.seed + 1)  # what is imported on first use
        total = round(given.cases * share)
        counted, longest, since = Counter[str](), 0.0, time.monotonic()
        dice = random.Random(f"{name} {given.seed}")
        for _ in track(range(total), name):
            start = time.monotonic()
            with watch.watching():
                counted[hostile_peer.TARGETS[name](dice)] += 1
            longest = max(longest, time.monotonic() - start)
        figures[name] = {"cases": total, "outcomes": dict(counted), "longest_s": longest, "seconds": time.monotonic() - since}
        print(f"{name}: {total} cases, {dict(counted)}, the longest {longest:.2f} s")
    print(f"{sum(f['cases'] for f in figures.values())} cases; code that ran: {watch.ran or 'none'}")
    write(given.json, {"seed": given.seed, "code that ran": watch.ran, **figures})


if __name__ == "__main__":
    main()
