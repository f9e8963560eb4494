"""Grade-school arithmetic by `reasoning_gym`: sums, differences and products of digits, each as a question in words with one exact answer.

SmolLM2-135M-Instruct answers about a quarter of them right, which leaves something to reinforce in most groups of eight.
"""

from typing import Any

NAMES = ("chain_sum", "products")


def tasks(terms: int = 2, digits: int = 1) -> dict[str, dict[str, int]]:
    """The settings of each task: sums and differences of two to `terms` numbers, products of two, of at most `digits` digits."""
    numbers = {"min_digits": 1, "max_digits": digits}
    return {"chain_sum": {"min_terms": 2, "max_terms": terms, **numbers}, "products": {"min_terms": 2, "max_terms": 2, **numbers}}


def with_examples(rows: list[dict[str, Any]], examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make each question a conversation in which the examples were asked and answered before."""
    before = [{"role": role, "content": row[key]} for row in examples for role, key in (("user", "prompt"), ("assistant", "answer"))]
    return [{**row, "prompt": [*before, {"role": "user", "content": row["prompt"]}]} for row in rows]


def by_task(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group questions by their task, so that a mixture can draw each task as often."""
    return {task: [row for row in rows if row["data_source"] == task] for task in NAMES}


def questions(count: int, seed: int, leave_out: frozenset[str] = frozenset(), *, terms: int = 2, digits: int = 1) -> list[dict[str, Any]]:
    """Draw `count` different questions, or all there are, the tasks in turn and none of `leave_out`.

    Rows have `prompt`, `answer` and `data_source`. `terms` and `digits` are those of `tasks`.
    """
    import reasoning_gym

    rows: dict[str, dict[str, Any]] = {}
    drawn = {
        task: reasoning_gym.create_dataset(task, size=50 * count, seed=seed, **settings) for task, settings in tasks(terms, digits).items()
    }
    for index in range(50 * count):
        for task, items in drawn.items():
            if len(rows) == count:
                return list(rows.values())
            item = items[index]
            if item["question"] not in leave_out:
                rows.setdefault(item["question"], {"prompt": item["question"], "answer": str(item["answer"]), "data_source": task})
    return list(rows.values())
