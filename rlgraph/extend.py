"""What a node, model, engine or trainer of one's own is declared with."""

from rlgraph.engines.registry import EngineSpec as EngineSpec
from rlgraph.engines.registry import TrainerSpec as TrainerSpec
from rlgraph.graph.nodes import Model as Model
from rlgraph.graph.nodes import Operation as Operation
from rlgraph.graph.nodes import declare as declare
from rlgraph.graph.traits import ModelTraits as ModelTraits
from rlgraph.graph.traits import NodeTraits as NodeTraits
from rlgraph.nodes.base import Context as Context
from rlgraph.nodes.base import node as node
