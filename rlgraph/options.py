"""Values that prompts, rollouts, rewards, generators, teachers and policies take as an argument."""

from rlgraph.nodes.conversations import Chat as Chat
from rlgraph.nodes.rewards.calls import Retry as Retry
from rlgraph.nodes.rollout.dynamic_sampling import Refill as Refill
from rlgraph.nodes.training.guards import Guards as Guards
from rlgraph.nodes.training.teacher import by_source as by_source
from rlgraph.values.drafts import PromptLookup as PromptLookup
