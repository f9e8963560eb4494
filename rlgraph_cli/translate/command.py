"""What a translating command writes: the table of what becomes of each setting, and the recipe."""

import keyword
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rlgraph.errors import ConfigError
from rlgraph_cli.translate.settings import Kind, Outcome

HEADS: dict[Kind, str] = {
    "becomes": "BECOMES",
    "no effect": "HAS NO EFFECT HERE, AND WHY",
    "not possible": "IS NOT POSSIBLE",
    "unknown": "IS NO SETTING OF",
}


def write_file(
    source: str, library: str, outcomes: Sequence[Outcome], write: Callable[[str], str], out: Path, *, chosen: bool, skip: bool
) -> tuple[Path, str]:
    """Write the recipe that `write` makes of its name; return its file and the table of the settings.

    Raises ConfigError for settings that are unknown or not possible unless they are to be skipped, and where a file that nobody has
    `chosen` is there already.
    """
    stopped = [each for each in outcomes if each.kind in ("not possible", "unknown")]
    if stopped and not skip:
        first = "\n".join(f"  {_where(source, each)}{each.setting.text}: {each.text}" for each in stopped[:8])
        more = f"\n  and {len(stopped) - 8} more" if len(stopped) > 8 else ""
        count = f"{len(stopped)} of {len(outcomes)} settings have no counterpart"
        raise ConfigError(f"{source}: {count}:\n{first}{more}\npass --skip to write the recipe without them")
    name = graph_name(out.stem)
    text = write(name)
    file = out if chosen else Path(f"{name}.py")
    if file.exists() and not chosen:
        raise ConfigError(f"'{file}' exists; choose another file with -o, or remove it")
    file.write_text(text, encoding="utf-8")
    return file, table(outcomes, library)


def _where(source: str, outcome: Outcome) -> str:
    return f"{Path(source).name}:{outcome.setting.line}: " if outcome.setting.line else ""


def table(outcomes: Sequence[Outcome], library: str) -> str:
    """Lay out every setting with its line of the script, and what becomes of it."""
    width = min(72, max((len(each.setting.text) for each in outcomes), default=0))
    lines = []
    for kind, head in HEADS.items():
        rows = [each for each in outcomes if each.kind == kind]
        lines += ["", f"{head}{f' {library.upper()}' if kind == 'unknown' else ''} ({len(rows)})"] if rows else []
        for each in rows:
            text = each.setting.text if len(each.setting.text) <= width else each.setting.text[: width - 1] + "…"
            lines += [f"{each.setting.line or '':>5}  {text:<{width}}  {each.text}"]
    return "\n".join(lines[1:])


def graph_name(text: str) -> str:
    """Make a name of Python's of a script's or an experiment's.

    >>> graph_name("run_qwen3-8b.fsdp")
    'run_qwen3_8b_fsdp'
    """
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "training"
    return f"run_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
