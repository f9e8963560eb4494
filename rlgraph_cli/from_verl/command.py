"""The command `rlgraph from-verl`: the table of what becomes of each setting, and the recipe."""

from collections.abc import Sequence
from pathlib import Path

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.recipe import graph_name, write_recipe
from rlgraph_cli.from_verl.script import Call, read_call
from rlgraph_cli.from_verl.settings import Kind, Outcome, Values, outcome_of

HEADS: dict[Kind, str] = {
    "becomes": "BECOMES",
    "no effect": "HAS NO EFFECT HERE, AND WHY",
    "not possible": "IS NOT POSSIBLE",
    "unknown": "IS NO SETTING OF VERL",
}
TRAINERS = ("main_ppo", "main_ppo_sync", "async_main_ppo", "fully_async_main", "sft_trainer", "fsdp_sft_trainer")


def translate(source: Path | None, overrides: Sequence[str], out: Path | None, skip: bool) -> tuple[Path, str]:
    """Write the recipe of a training of verl; return its file and the table of its settings.

    Raises ConfigError for what `read_call` and `write_recipe` refuse, for settings that are unknown or not possible unless they are to be
    skipped, and where the recipe's file is there already.
    """
    started = read_call(source, overrides)
    outcomes = [outcome_of(setting) for setting in started.settings]
    if started.module.rpartition(".")[2] not in TRAINERS and not started.module.endswith(".py"):
        raise ConfigError(f"{started.source}: {started.module} is no trainer; known are {', '.join(TRAINERS)}")
    stopped = [each for each in outcomes if each.kind in ("not possible", "unknown")]
    if stopped and not skip:
        first = "\n".join(f"  {_where(started, each)}{each.setting.text}: {each.text}" for each in stopped[:8])
        more = f"\n  and {len(stopped) - 8} more" if len(stopped) > 8 else ""
        count = f"{len(stopped)} of {len(outcomes)} settings have no counterpart"
        raise ConfigError(f"{started.source}: {count}:\n{first}{more}\ngive --skip to write the recipe without them")
    name = graph_name(out.stem if out else (source.stem if source else "from_verl"))
    text = write_recipe(started, Values.of(started, outcomes), name)
    file = out or Path(f"{name}.py")
    if out is None and file.exists():
        raise ConfigError(f"'{file}' is there already; choose another file with -o, or remove it")
    file.write_text(text, encoding="utf-8")
    return file, table(outcomes)


def _where(started: Call, outcome: Outcome) -> str:
    return f"{Path(started.source).name}:{outcome.setting.line}: " if outcome.setting.line else ""


def table(outcomes: Sequence[Outcome]) -> str:
    """Lay out every setting with its line of the script, and what becomes of it."""
    width = min(72, max((len(each.setting.text) for each in outcomes), default=0))
    lines = []
    for kind, head in HEADS.items():
        rows = [each for each in outcomes if each.kind == kind]
        lines += ["", f"{head} ({len(rows)})"] if rows else []
        for each in rows:
            text = each.setting.text if len(each.setting.text) <= width else each.setting.text[: width - 1] + "…"
            lines += [f"{each.setting.line or '':>5}  {text:<{width}}  {each.text}"]
    return "\n".join(lines[1:])
