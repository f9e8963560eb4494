"""Recipes, run in the process of a test."""

import runpy
import sys

import pytest
from support.paths import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}


def run_recipe(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Do in this process what `python recipes/NAME.py ARGUMENTS` does."""
    recipe = RECIPES[name]
    monkeypatch.setattr(sys, "argv", [str(recipe), *arguments])
    monkeypatch.syspath_prepend(recipe.parent)
    runpy.run_path(str(recipe), run_name="__main__")
