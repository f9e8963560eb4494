"""verl's reward function for the sums: 1.0 where the first number of the response is the right one."""

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **others: Any) -> float:
    first = re.match(r"\s*(\d+)", solution_str)
    return float(first is not None and first[1] == ground_truth)
