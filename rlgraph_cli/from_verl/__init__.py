"""Turns what starts a training of verl into a recipe: `rlgraph from-verl`."""
