"""What a command line lists: `depth=0,1,2` gives `tune` values to try, `--profile 3-5` gives `run` steps."""

import re
from collections.abc import Callable, Sequence

from rlgraph.errors import ConfigError

SEPARATOR = re.compile(r",(?![^\[{(]*[\]})])")  # a comma, but none inside of brackets: [1,2] is one value


def choices_of(settings: Sequence[str], check: Callable[[Sequence[str]], object]) -> tuple[list[str], dict[str, list[str]]]:
    """Split settings into those that are set and those with values to try, each of which `check` takes.

    >>> choices_of(["prompts=64", "depth=0,1,2", "betas=[0.9,0.99]"], print)[0]
    ['prompts=64', 'betas=[0.9,0.99]']
    ['prompts=64', 'betas=[0.9,0.99]', 'depth=0']
    ['prompts=64', 'betas=[0.9,0.99]', 'depth=1']
    ['prompts=64', 'betas=[0.9,0.99]', 'depth=2']
    ['prompts=64', 'betas=[0.9,0.99]']

    Raises ConfigError if no setting has several values, and what `check` raises.
    """
    parts = {text: SEPARATOR.split(text.partition("=")[2]) for text in settings}
    fixed = [text for text, values in parts.items() if len(values) == 1]
    choices = {text.partition("=")[0]: values for text, values in parts.items() if len(values) > 1}
    check(fixed)
    for key, values in choices.items():
        for value in values:
            check([*fixed, f"{key}={value}"])
    if not choices:
        raise ConfigError(f"tune {' '.join(settings)}: no setting has several values; list the values to try, e.g. depth=0,1,2")
    return fixed, choices


def steps_of(text: str) -> int | tuple[int, int]:
    """Read the steps of a profile: "3", or the first and the last one, "3-5". Raises ConfigError for another text.

    >>> steps_of("3"), steps_of("3-5")
    (3, (3, 5))
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ConfigError(f"--profile {text}: pass a step, e.g. 3, or the first and the last one, as 3-5")
    return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))
