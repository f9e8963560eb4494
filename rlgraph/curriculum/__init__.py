"""Curricula: graphs that run one after the other, each from the weights that an earlier one trained."""
