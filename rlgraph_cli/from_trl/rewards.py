"""Reads the rewards of a script, and writes the function that scores with them."""

import ast
from dataclasses import dataclass
from typing import Any

from rlgraph_cli.from_trl.values import Source, Unreadable
from rlgraph_cli.translate.page import Page, show
from rlgraph_cli.translate.settings import Setting, Unread

PASSED = ("prompts", "completions")  # what TRL gives a reward; any other argument is a column of the data
NOT_PASSED = ("environments", "trainer_state", "completion_ids", "prompt_ids", "log_extra", "log_metric")
THINKS = [
    "def thinks(completion) -> float:",
    '    text = completion if isinstance(completion, str) else completion[0]["content"]',
    '    return float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)',
]
# TRL's own rewards: the call that stands for each, the field that it reads, and the lines that define it.
KNOWN = {
    "accuracy_reward": (
        "[right(text, str(answer)) for text, answer in zip(responses, {})]",
        "solution",
        ["right = rg.scorers.math_verify()"],
    ),
    "think_format_reward": ("map(thinks, completions)", "", THINKS),
}


@dataclass(frozen=True)
class Reward:
    """A reward: a function of the script with its columns, one of TRL's by name, or a model."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    said: ast.expr | None = None  # as the trainer is given it
    model: str = ""

    @property
    def arguments(self) -> list[str]:
        """The arguments that the function names, but for those that have a default and are not given."""
        if self.node is None:
            return [KNOWN[self.name][1]] if KNOWN.get(self.name, ("", ""))[1] else []
        given = self.node.args
        plain = [each.arg for each in given.args]
        needed = [each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
        return [*(plain[: -len(given.defaults)] if given.defaults else plain), *needed]


def rewards_of(source: Source, node: ast.expr) -> tuple[tuple[Reward, ...], list[Setting]]:
    """Read one reward or a list of them, and list their settings."""
    rewards, settings = [], []
    made = source.follow(node)
    changed = isinstance(node, ast.Name) and any(node.id in scope.changed for scope in source.scopes)
    for each in made.elts if isinstance(made, ast.List | ast.Tuple) and not changed else [node]:
        text = ast.unparse(each)
        value: Any = text
        try:
            rewards.append(_reward(source, each))
        except Unreadable as error:
            value = Unread(error.why)
        settings.append(Setting("reward_funcs", value, f"reward_funcs={text}", each.lineno))
    return tuple(rewards), settings


def _reward(source: Source, node: ast.expr) -> Reward:
    made = source.follow(node)
    name = made.value if isinstance(made, ast.Constant) else node.id if isinstance(node, ast.Name) else ""
    if (isinstance(made, ast.ImportFrom) and (made.module or "").startswith("trl")) or isinstance(made, ast.Constant):
        if name in KNOWN:
            return Reward(str(name))
        if isinstance(made, ast.Constant) and "/" in str(name):
            return Reward(str(name), model=str(name))
        raise Unreadable(node, f"has no counterpart; use {' or '.join(KNOWN)}, write a function, or use rg.estimators.OverlongPenalty")
    if not isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef):
        raise Unreadable(node, "is not a function that the script defines; write `def reward(completions, **kwargs)` in it")
    reward = Reward(made.name, made, node)
    if wrong := [each for each in reward.arguments if each in NOT_PASSED]:
        raise Unreadable(node, f"reads {', '.join(wrong)}, which rewards of a recipe do not get; rg.reward passes columns")
    return reward


def write_score(page: Page, rewards: tuple[Reward, ...], weights: list[float] | None) -> None:
    """Write `score`: the sum of the rewards of each response, from functions with TRL's arguments."""
    fields = list(dict.fromkeys(name for each in rewards for name in each.arguments if name not in PASSED))
    columns = {name: name if name.endswith("s") else f"{name}s" for name in fields}
    prompts = any("prompts" in each.arguments for each in rewards)
    waits = any(isinstance(each.node, ast.AsyncFunctionDef) for each in rewards)
    given = ["responses", *columns.values(), *(["prompt_texts"] if prompts else []), "prompt_messages=None"]
    calls = []
    for each in rewards:
        if each.node is None:
            call, field, defined = KNOWN[each.name]
            page.body += ["", "", *defined]
            calls.append(call.format(columns.get(field, "")))
            continue
        passed = ", ".join(f"{name}={columns.get(name, name)}" for name in each.arguments)
        calls.append(f"{'await ' if isinstance(each.node, ast.AsyncFunctionDef) else ''}{each.name}({passed})")
    page.body += [
        "",
        "",
        f"{'async ' if waits else ''}def score({', '.join(given)}) -> list[float]:",
        '    """The rewards of the responses. Of conversations TRL\'s functions get messages."""',
        '    completions = [[{"role": "assistant", "content": text}] for text in responses] if prompt_messages else responses',
        *(["    prompts = [json.loads(each) for each in prompt_messages] if prompt_messages else prompt_texts"] if prompts else []),
    ]
    if prompts:
        page.imports.append("import json")
    if len(calls) == 1 and not weights:
        page.body += [f"    return [part or 0.0 for part in {calls[0]}]", "", ""]
        return
    page.body += [
        f"    parts = zip({', '.join(calls)})",
        f"    weights = {show(tuple(weights or [1.0] * len(calls)))}",
        "    return [sum(weight * (part or 0.0) for weight, part in zip(weights, row)) for row in parts]",
        "",
        "",
    ]
