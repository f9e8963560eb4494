"""Folders that tests start programs in, and what those programs import from."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"
PYTHONPATH = f"{TESTS}:{ROOT}"
