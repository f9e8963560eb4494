"""The settings of `rlgraph tune`: `depth=0,1,2` gives values to try, `prompts=64` only sets one."""

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
        raise ConfigError(f"tune {' '.join(settings)}: no setting has several values; give those to try, as depth=0,1,2")
    return fixed, choices
