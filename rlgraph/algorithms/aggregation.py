"""How a loss over tokens becomes one number."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """What a whole mini-batch holds over all ranks: trained tokens, and rows. A micro-batch divides by these."""

    tokens: int
    rows: int
