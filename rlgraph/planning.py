"""Costs and lengths that plans are predicted from, and what measures, replays and rehearses them."""

from rlgraph.api import profile as profile
from rlgraph.api import rehearse as rehearse
from rlgraph.api import replay as replay
from rlgraph.api import tune as tune
from rlgraph.plan.cluster import Precision as Precision
from rlgraph.plan.cost_functions import NodeCost as NodeCost
from rlgraph.plan.costs import Costs as Costs
from rlgraph.plan.lengths import Lengths as Lengths
from rlgraph.plan.plan import Replan as Replan
from rlgraph.plan.rehearse import ClusterSite as ClusterSite
from rlgraph.recording.samples import Profile as Profile
