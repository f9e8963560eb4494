"""Stages beyond those at the top of `rlgraph`: solutions with their steps, filters, shaped rewards, the correction of a rollout."""

from rlgraph.nodes.examples import stepwise as stepwise
from rlgraph.nodes.rewards.reward import kl_shaped_rewards as kl_shaped_rewards
from rlgraph.nodes.rewards.reward import shaped_rewards as shaped_rewards
from rlgraph.nodes.training.advantages import filter_groups as filter_groups
from rlgraph.nodes.training.advantages import filter_truncated as filter_truncated
from rlgraph.nodes.training.advantages import rollout_correction as rollout_correction
