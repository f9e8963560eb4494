"""Measurements of rlgraph beside its peers. README.md next to this says which folder has which."""
