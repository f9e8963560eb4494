"""Losses of policies, critics, reward models and supervised training, for `update(loss=…)`."""

from rlgraph.algorithms import CISPO as CISPO
from rlgraph.algorithms import DPO as DPO
from rlgraph.algorithms import DPPO as DPPO
from rlgraph.algorithms import DRO as DRO
from rlgraph.algorithms import GMPO as GMPO
from rlgraph.algorithms import GSPO as GSPO
from rlgraph.algorithms import IPO as IPO
from rlgraph.algorithms import KTO as KTO
from rlgraph.algorithms import ORPO as ORPO
from rlgraph.algorithms import SAPO as SAPO
from rlgraph.algorithms import BradleyTerry as BradleyTerry
from rlgraph.algorithms import Bypass as Bypass
from rlgraph.algorithms import ClipCov as ClipCov
from rlgraph.algorithms import ClippedLoss as ClippedLoss
from rlgraph.algorithms import DistillationLoss as DistillationLoss
from rlgraph.algorithms import KlCov as KlCov
from rlgraph.algorithms import PolicyLoss as PolicyLoss
from rlgraph.algorithms import ProximalLoss as ProximalLoss
from rlgraph.algorithms import Reinforce as Reinforce
from rlgraph.algorithms import SFTLoss as SFTLoss
from rlgraph.algorithms import SimPO as SimPO
from rlgraph.algorithms import StepwiseLoss as StepwiseLoss
from rlgraph.algorithms import ValueLoss as ValueLoss
from rlgraph.algorithms import WholeLoss as WholeLoss
