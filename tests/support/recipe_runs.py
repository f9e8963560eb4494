"""Recipes, run in the process of a test."""

import runpy
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}


def run_recipe(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Do in this process what `python recipes/NAME.py ARGUMENTS` does."""
    run_program(RECIPES[name], monkeypatch, *arguments)


def run_program(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path), run_name="__main__")
