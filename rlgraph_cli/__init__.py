"""The command `rlgraph`: each of its commands is a thin call of the Python API.

It is a package next to `rlgraph`, not a part of it: importing `rlgraph` imports torch, and `rlgraph --help` must not wait for that.
"""

from rlgraph_cli.app import main

__all__ = ["main"]
