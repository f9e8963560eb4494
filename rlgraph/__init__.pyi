"""The public names, each once: type checkers read this file, and so does the package when it is imported."""

from typing import Any

from rlgraph import agents as agents
from rlgraph import data as data
from rlgraph import environments as environments
from rlgraph import errors as errors
from rlgraph import estimators as estimators
from rlgraph import extend as extend
from rlgraph import losses as losses
from rlgraph import optim as optim
from rlgraph import options as options
from rlgraph import planning as planning
from rlgraph import runs as runs
from rlgraph import stages as stages
from rlgraph.algorithms import DPO as DPO
from rlgraph.algorithms import GAE as GAE
from rlgraph.algorithms import GRPO as GRPO
from rlgraph.algorithms import RLOO as RLOO
from rlgraph.algorithms import ClippedLoss as ClippedLoss
from rlgraph.algorithms import SFTLoss as SFTLoss
from rlgraph.api import compile as compile
from rlgraph.api import record as record
from rlgraph.api import report as report
from rlgraph.api import tune as tune
from rlgraph.columns import Columns as Columns
from rlgraph.config import config as config
from rlgraph.curriculum import run as run
from rlgraph.engines.hf.pretrained import model_folder as model_folder
from rlgraph.errors import RlgraphError as RlgraphError
from rlgraph.graph.graph import Graph as Graph
from rlgraph.graph.nodes import Output as Output
from rlgraph.graph.nodes import feedback as feedback
from rlgraph.nodes.base import node as node
from rlgraph.nodes.environments import tools as tools
from rlgraph.nodes.environments.agent import Agent as Agent
from rlgraph.nodes.environments.agent import Environment as Environment
from rlgraph.nodes.environments.program import Program as Program
from rlgraph.nodes.environments.tools import Tools as Tools
from rlgraph.nodes.examples import examples as examples
from rlgraph.nodes.examples import pairs as pairs
from rlgraph.nodes.prompts import prompts as prompts
from rlgraph.nodes.rewards import scorers as scorers
from rlgraph.nodes.rewards.reward import reward as reward
from rlgraph.nodes.rewards.reward_model import RewardModel as RewardModel
from rlgraph.nodes.rollout.evaluation import evaluate as evaluate
from rlgraph.nodes.rollout.rollout import Generator as Generator
from rlgraph.nodes.training.advantages import advantages as advantages
from rlgraph.nodes.training.advantages import preferred as preferred
from rlgraph.nodes.training.critic import Critic as Critic
from rlgraph.nodes.training.learned_reward import LearnedReward as LearnedReward
from rlgraph.nodes.training.policy import Policy as Policy
from rlgraph.nodes.training.reference import Reference as Reference
from rlgraph.nodes.training.teacher import Teacher as Teacher
from rlgraph.plan.cluster import Cluster as Cluster
from rlgraph.plan.plan import Plan as Plan
from rlgraph.runtime.driver.discovery import cluster as cluster
from rlgraph.runtime.driver.hosts import local_cluster as local_cluster
from rlgraph.runtime.driver.job import Job as Job
from rlgraph.values.lora import LoRA as LoRA
from rlgraph.values.optimizers import AdamW as AdamW
from rlgraph.values.pool import Pool as Pool
from rlgraph.values.sampling import Sampling as Sampling

__all__: list[str]
_NAMES: dict[str, str]
_SUBJECTS: list[str]

def spelling(name: str) -> str: ...
def __getattr__(name: str) -> Any: ...
