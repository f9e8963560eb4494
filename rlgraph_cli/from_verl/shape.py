"""What a training's graph depends on: how devices are shared, and how many prompts and optimizer steps a step has."""

from dataclasses import dataclass
from typing import Any

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.script import Call
from rlgraph_cli.translate.settings import Values

# Where verl keeps the settings of the trained model.

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."


@dataclass(frozen=True)
class Shape:
    """What the lines of a training's graph depend on: how devices are shared, and how many prompts and optimizer steps a step has."""

    apart: bool
    streamed: bool  # verl's fully asynchronous trainer
    prompts: int
    mini_batches: int
    depth: int
    bypass: bool


def shape_of(started: Call, values: Values) -> Shape:
    """Work out the shape of a training from the trainer that runs and its settings."""
    fully, one_step = "fully_async" in started.module, "one_step_off" in started.module
    mode = values["trainer.v1.trainer_mode"] or "sync"
    apart = fully or one_step or values["actor_rollout_ref.hybrid_engine"] is False or mode == "separate_async"
    apart = apart or values.has("trainer.use_nodes_ratios")
    mini = values.count(f"{ACTOR}ppo_mini_batch_size")
    if fully:
        each = mini * values.count("async_training.require_batches")
        updates = values.count("async_training.trigger_parameter_sync_step")
        prompts, mini_batches = each * updates, updates * max(1, each // mini)
        stale = values.decimal("async_training.staleness_threshold")
        depth = -(-stale // 1)
    else:
        prompts = values.count("data.train_batch_size")
        if prompts % mini:
            raise ConfigError(f"from-verl: ppo_mini_batch_size={mini} does not divide data.train_batch_size={prompts}, which verl refuses")
        mini_batches = prompts // mini
        if mode == "separate_async":
            updates = values.count("trainer.v1.separate_async.parameter_sync_step")
            prompts, mini_batches = prompts * updates, mini_batches * updates
        depth = values.whole("trainer.generate_ahead_steps", int(apart) + 1) - 1
        limit = values.whole("trainer.v1.sampler.max_off_policy_threshold", 0)
        depth = limit if limit and mode == "separate_async" else depth
    if depth < 0:
        raise ConfigError("from-verl: trainer.generate_ahead_steps=0: the proposal counts from 1, which is on-policy")
    given = values["algorithm.rollout_correction.bypass_mode"]
    bypass = bool(given) if given is not None else fully or one_step
    return Shape(apart, fully, prompts, mini_batches, int(depth), bypass)


def shares_of(values: Values) -> tuple[Any, Any]:
    """Read what trainer and rollout get of the GPUs: the proposal's ratios, or numbers of GPUs."""
    ratios = values["trainer.use_nodes_ratios"]
    if ratios:
        if not isinstance(ratios, list) or len(ratios) != 4 or len(set(ratios[:3])) != 1:
            raise ConfigError(
                f"from-verl: trainer.use_nodes_ratios={ratios}: give four shares, of train, logp, ref_logp and "
                "generate; the first three are one pool, and so are equal"
            )
        if not all(isinstance(ratio, int | float) for ratio in ratios):
            raise ConfigError(f"from-verl: trainer.use_nodes_ratios={ratios} must be numbers")
        return ratios[0], ratios[3]
    train = values.count("trainer.nnodes") * values.count("trainer.n_gpus_per_node")
    roll = values.count("rollout.nnodes") * values.count("rollout.n_gpus_per_node")
    return train, roll
