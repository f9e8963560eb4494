"""The command `rlgraph from-verl`."""

from collections.abc import Sequence
from pathlib import Path

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.recipe import write_recipe
from rlgraph_cli.from_verl.script import read_call
from rlgraph_cli.from_verl.settings import TABLES, values_of
from rlgraph_cli.translate.command import write_file

TRAINERS = ("main_ppo", "main_ppo_sync", "async_main_ppo", "fully_async_main", "sft_trainer", "fsdp_sft_trainer")


def translate(source: Path | None, overrides: Sequence[str], out: Path | None, skip: bool) -> tuple[Path, str]:
    """Write the recipe of a training of verl; return its file and the table of its settings.

    Raises ConfigError for what `read_call`, `write_recipe` and `write_file` refuse.
    """
    started = read_call(source, overrides)
    if started.module.rpartition(".")[2] not in TRAINERS and not started.module.endswith(".py"):
        raise ConfigError(f"{started.source}: {started.module} is not a trainer that from-verl knows; it knows {', '.join(TRAINERS)}")
    outcomes = [TABLES.outcome_of(setting) for setting in started.settings]
    return write_file(
        started.source,
        "verl",
        outcomes,
        lambda name: write_recipe(started, values_of(started, outcomes), name),
        out or source or Path("from_verl"),
        chosen=out is not None,
        skip=skip,
    )
