"""Chains of sums, differences and comparisons of very different length, each solved line by line and answered by one number."""

import random
import re

TAIL = 0.75  # half of the chains have at most 1.7 times the fewest lines, one in ten more than 5.6 times, one in fifty more than 18 times


def chains(count: int, seed: int, shortest: int = 4, longest: int = 60) -> list[dict[str, str]]:
    """Draw `count` different questions of `shortest` to `longest` lines, each with the `completion` that solves it and its `answer`."""
    draw = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        row = chain(draw, min(longest, int(shortest / (1 - draw.random()) ** TAIL)))
        rows.setdefault(row["prompt"], row)
    return list(rows.values())


def chain(draw: random.Random, lines: int) -> dict[str, str]:
    """Draw one question: a number, and so many lines that each change it by a sum, a difference or a comparison."""
    total = draw.randint(10, 99)
    asked, solved = [f"Begin with {total}."], []
    for line in range(1, lines + 1):
        number, sign = draw.randint(2, 49), draw.choice("+-")
        if draw.random() < 0.25:
            asked.append(f"{line}: max {number}")
            solved.append(f"{line}: max({total},{number})={max(total, number)}")
            total = max(total, number)
        else:
            sign = "+" if number > total else "-" if total > 99 else sign  # totals stay between 0 and 148
            asked.append(f"{line}: {sign}{number}")
            solved.append(f"{line}: {total}{sign}{number}={total + number if sign == '+' else total - number}")
            total += number if sign == "+" else -number
    return {"prompt": "\n".join([*asked, "Solution:\n"]), "completion": "\n".join([*solved, f"Answer: {total}"]), "answer": str(total)}


def right_answer(responses: list[str], answers: list[str]) -> list[float]:
    """Score 1 for each response whose last line is the right answer, else 0."""
    last = (re.search(r"\nAnswer: (\d+)\s*$", response) for response in responses)
    return [float(found is not None and found[1] == answer) for found, answer in zip(last, answers, strict=True)]
