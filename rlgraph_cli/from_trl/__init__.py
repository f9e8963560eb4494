"""Turns a script that trains with TRL into a recipe: `rlgraph from-trl`."""
