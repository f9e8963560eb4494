"""The command line of a benchmark, and the file of results that it writes."""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import machine


def command_line(doc: str | None, smoke: str = "") -> argparse.ArgumentParser:
    """Build the arguments of a script with this docstring: `--json FILE`, and `--smoke` if its help is given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    if smoke:
        parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def write(path: Path | None, found: Any) -> None:
    """Write results as JSON if the command line names a file."""
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_measured(path: Path | None, found: dict[str, Any]) -> None:
    """Write results and the machine that they were measured on."""
    if path:
        write(path, found | machine())
