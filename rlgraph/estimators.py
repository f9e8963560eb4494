"""Estimators of advantages, corrections of the rollout's policy, and penalties."""

from rlgraph.algorithms import GAE as GAE
from rlgraph.algorithms import GDPO as GDPO
from rlgraph.algorithms import GPG as GPG
from rlgraph.algorithms import GRPO as GRPO
from rlgraph.algorithms import OPO as OPO
from rlgraph.algorithms import RLOO as RLOO
from rlgraph.algorithms import AdaptiveKL as AdaptiveKL
from rlgraph.algorithms import FixedKL as FixedKL
from rlgraph.algorithms import IcePop as IcePop
from rlgraph.algorithms import ImportanceWeights as ImportanceWeights
from rlgraph.algorithms import OptimalTokenBaseline as OptimalTokenBaseline
from rlgraph.algorithms import OverlongPenalty as OverlongPenalty
from rlgraph.algorithms import PassK as PassK
from rlgraph.algorithms import ProcessGRPO as ProcessGRPO
from rlgraph.algorithms import ReinforcePlusPlus as ReinforcePlusPlus
from rlgraph.algorithms import ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline
from rlgraph.algorithms import Rejection as Rejection
from rlgraph.algorithms import ReMax as ReMax
from rlgraph.algorithms import RolloutCorrection as RolloutCorrection
from rlgraph.algorithms import TeacherKL as TeacherKL
from rlgraph.algorithms import TruncatedIS as TruncatedIS
