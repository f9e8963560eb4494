"""Run as a script: a program that waits for a tool's code, which never ends."""

import asyncio

from rlgraph.nodes.sandbox import Limits, run

asyncio.run(run("while True: pass", Limits(seconds=60)))
