"""Sums of two two-digit numbers with a calculator: one tool call, shown in the prompt, and the answer after it."""

import random
import re

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a} + {b}"}}}}</tool_call>\n'
SHOWN = [(12, 30, 42), (55, 17, 72)]


def questions(seed: int, count: int = 4096) -> list[dict[str, str]]:
    """Draw questions, each after two that were answered with the calculator."""
    draw = random.Random(seed)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [{"prompt": _prompt(a, b), "answer": str(a + b)} for a, b in pairs]


def _prompt(a: int, b: int) -> str:
    shown = "".join(f"Q: {x} + {y}\n{CALL.format(a=x, b=y)}\n<tool_response>\n{z}\n</tool_response>\n{z}\n\n" for x, y, z in SHOWN)
    return f"{shown}Q: {a} + {b}\n"


def last_line(responses: list[str], answers: list[str]) -> list[float]:
    """Score 1 for each response whose last line is the right number, else 0."""
    lines = [response.strip().rsplit("\n", 1)[-1] for response in responses]
    return [float(re.sub(r".*</tool_call>", "", line).strip() == answer) for line, answer in zip(lines, answers, strict=True)]
