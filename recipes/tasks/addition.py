"""Few-shot addition: two solved sums, then one to solve. Two cores learn it in minutes."""

import random
import re
from typing import Any


def sums(seed: int, count: int = 4096) -> list[dict[str, str]]:
    """Draw additions of two numbers from 1 to 9, each after two solved ones."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]
    return [{"prompt": f"2 + 3 = 5\n7 + 6 = 13\n{a} + {b} =", "answer": str(a + b)} for a, b in pairs]


def differences(seed: int, count: int = 4096) -> list[dict[str, str]]:
    """Draw differences of numbers from 1 to 9 that are not negative, each after two solved ones."""
    draw = random.Random(seed)
    pairs = [sorted((draw.randint(1, 9), draw.randint(1, 9))) for _ in range(count)]
    return [{"prompt": f"9 - 4 = 5\n8 - 2 = 6\n{b} - {a} =", "answer": str(b - a)} for a, b in pairs]


def solutions(seed: int, count: int = 1024) -> list[dict[str, Any]]:
    """Draw sums of three numbers with solutions of two steps: an equation is a good step, and words are a bad one."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        a, b, c = (draw.randint(1, 9) for _ in range(3))
        equations = [f"{a} + {b} = {a + b}", f"{a + b} + {c} = {a + b + c}"]
        words = [f"First we add {a} and {b}.", f"Then we add {c} to the result."]
        good = [draw.random() < 0.5 for _ in range(2)]
        steps = [one if right else other for one, other, right in zip(equations, words, good, strict=True)]
        made.append({"prompt": f"Add {a}, {b} and {c} in two steps:\n", "completions": steps, "labels": good})
    return made


def questions(seed: int, count: int = 4096) -> list[dict[str, str]]:
    """Draw the same sums as bare questions, "7 + 5"."""
    return [{**row, "prompt": row["prompt"].splitlines()[-1].removesuffix(" =")} for row in sums(seed, count)]


def wrong_and_right(seed: int, count: int = 4096, apart: tuple[int, ...] = (-2, -1, 1, 2)) -> list[dict[str, str]]:
    """Pair the right answer to each sum, as `chosen`, with a wrong one that is so far `apart`."""
    draw = random.Random(seed + 1)
    near = [(row, int(row["answer"]) + draw.choice(apart)) for row in sums(seed, count)]
    return [{"prompt": row["prompt"], "chosen": f" {row['answer']}", "rejected": f" {wrong}"} for row, wrong in near]


def right_number(responses: list[str], answers: list[str]) -> list[float]:
    """Score 1 for each response that begins with the right number, else 0."""
    numbers = [re.match(r"\s*(\d+)", response) for response in responses]
    return [float(number is not None and number[1] == answer) for number, answer in zip(numbers, answers, strict=True)]


def brevity(responses: list[str]) -> list[float]:
    """Reward 1 for a response of one word, less for more."""
    return [1 / max(len(response.split()), 1) for response in responses]
