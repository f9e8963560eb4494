"""Sums of two two-digit numbers with a calculator: one tool call, shown in earlier turns, and the answer after it."""

import random

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a} + {b}"}}}}</tool_call>'
SHOWN = [(12, 30, 42), (55, 17, 72)]
SYSTEM = "You have a calculator. Call it first, then give the sum alone."


def questions(seed: int, count: int = 4096) -> list[dict[str, object]]:
    """Draw questions, each after two that were answered with the calculator."""
    draw = random.Random(seed)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [{"prompt": [*shown(), {"role": "user", "content": f"{a} + {b}"}], "answer": str(a + b)} for a, b in pairs]


def shown() -> list[dict[str, str]]:
    """Give the earlier turns. SmolLM2's template describes no tools, so the calls are written out in the format of Hermes."""
    messages = [{"role": "system", "content": SYSTEM}]
    for a, b, c in SHOWN:
        messages += [
            {"role": "user", "content": f"{a} + {b}"},
            {"role": "assistant", "content": CALL.format(a=a, b=b)},
            {"role": "tool", "content": str(c)},
            {"role": "assistant", "content": str(c)},
        ]
    return messages


def last_turn(responses: list[str], answers: list[str]) -> list[float]:
    """Score 1 for each response that ends with the right number after its call, else 0."""
    ends = [response.rpartition("</tool_call>")[2].strip() for response in responses]
    return [float(end == answer) for end, answer in zip(ends, answers, strict=True)]
