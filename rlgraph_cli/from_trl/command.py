"""The command `rlgraph from-trl`."""

from collections.abc import Sequence
from pathlib import Path

from rlgraph.errors import ConfigError
from rlgraph_cli.from_trl.recipe import write_recipe
from rlgraph_cli.from_trl.script import read_script
from rlgraph_cli.from_trl.values import Unreadable
from rlgraph_cli.translate.command import write_file
from rlgraph_cli.translate.settings import Values


def translate(source: Path, flags: Sequence[str], out: Path | None, skip: bool) -> tuple[Path, str]:
    """Write the recipe of a script that trains with TRL; return its file and the table of its settings.

    Raises ConfigError for what `read_script`, `write_recipe` and `write_file` refuse.
    """
    script = read_script(source, flags)
    outcomes = [script.tables.outcome_of(setting) for setting in script.settings]

    def write(name: str) -> str:
        try:
            return write_recipe(script, Values.of(script.tables, str(source), outcomes), name)
        except Unreadable as error:
            raise ConfigError(f"{source}:{error.line}: {error.why}") from None

    return write_file(str(source), "TRL", outcomes, write, out or Path(f"{source.stem}_rlgraph.py"), chosen=out is not None, skip=skip)
