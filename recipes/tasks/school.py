"""Grade-school arithmetic by `reasoning_gym`: sums, differences and products, each as a question in words with one exact answer."""

from typing import Any

TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def with_examples(rows: list[dict[str, Any]], examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make each question a conversation in which the examples were asked and answered before."""
    before = [{"role": role, "content": row[key]} for row in examples for role, key in (("user", "prompt"), ("assistant", "answer"))]
    return [{**row, "prompt": [*before, {"role": "user", "content": row["prompt"]}]} for row in rows]


def questions(count: int, seed: int, leave_out: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Draw `count` different questions, the tasks in turn, none of `leave_out`: rows with `prompt`, `answer` and `data_source`."""
    import reasoning_gym

    rows: dict[str, dict[str, Any]] = {}
    drawn = {task: reasoning_gym.create_dataset(task, size=50 * count, seed=seed, **settings) for task, settings in TASKS.items()}
    for index in range(50 * count):
        for task, items in drawn.items():
            if len(rows) == count:
                return list(rows.values())
            item = items[index]
            if item["question"] not in leave_out:
                rows.setdefault(item["question"], {"prompt": item["question"], "answer": str(item["answer"]), "data_source": task})
    return list(rows.values())
