"""Optimizers, and schedules of their learning rate."""

from rlgraph.values.optimizers import WSD as WSD
from rlgraph.values.optimizers import AdamW as AdamW
from rlgraph.values.optimizers import Constant as Constant
from rlgraph.values.optimizers import Cosine as Cosine
from rlgraph.values.optimizers import Linear as Linear
from rlgraph.values.optimizers import Muon as Muon
