"""Write validation.json: what verl 0.9.1 reports of validations. Runs in the oracle's own environment: `make oracle`.

Each case is a set of answers with data sources, items, correctness and what each answer says; and verl's metrics of them.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl import __version__ as verl_version
    from verl.trainer.ppo.metric_utils import process_validation_metrics

GOLDEN = Path(__file__).with_name("validation.json")
CASES = {"one answer": (5, 1), "two": (4, 2), "five": (6, 5), "eight": (5, 8), "32": (3, 32)}


def case(items: int, samples: int, kind: str, seed: int) -> dict[str, Any]:
    """Draw answers: `acc` of 0 and 1, or of 1, 0.5 and 0; votes of few words, so that there are ties and empty answers."""
    draws = np.random.RandomState(seed)
    sources = [("maths", "code")[draws.randint(2)] for _ in range(items)]
    acc = draws.randint(2, size=(items, samples)) if kind == "binary" else draws.choice([0.0, 0.5, 1.0], size=(items, samples))
    votes = draws.choice(["", "12", "13", "x"], size=(items, samples))
    given: dict[str, list[Any]] = {"acc": [float(a) for a in acc.ravel()]}
    if kind != "silent":
        given["pred"] = [str(vote) for vote in votes.ravel()]
    of_each = np.repeat(sources, samples).tolist(), np.repeat([f"item {i}" for i in range(items)], samples).tolist()
    found = process_validation_metrics(*of_each, given)
    metrics = {f"{source}/acc/{name}": float(value) for source, of in found.items() for name, value in of["acc"].items()}
    return {"sources": sources, "samples": samples, **given, "metrics": metrics}


def main() -> None:
    cases = {
        f"{name}, {kind}": case(*shape, kind, seed)
        for seed, (name, shape) in enumerate(CASES.items())
        for kind in ("binary", "graded", "silent")
    }
    GOLDEN.write_text(json.dumps({"verl": verl_version, "numpy": np.__version__, "cases": cases}) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, verl {verl_version}", file=sys.stderr)


if __name__ == "__main__":
    main()
