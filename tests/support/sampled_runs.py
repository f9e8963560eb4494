"""Samples as a recorder writes them, made up: a step has a group of four, with turns of tools, odd texts and log-probs."""

import json
import math
import random
from pathlib import Path
from typing import Any

from rlgraph.analysis.samples import FIELDS

HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">&amp;<!-- ]]> \u2028 \x00\x1b \ud7ff"
)
CHAT = "<|im_start|>system\nYou are careful.<|im_end|>\n<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"


def sample(step: int, row: int, *, response: str | None = None, tool: bool = False, draw: random.Random | None = None) -> dict[str, Any]:
    draw = draw or random.Random(step * 100 + row)
    a, b = row // 4 + step, 3
    said = (
        response
        if response is not None
        else f"Let me add {a} and {b}: that makes {a + b + draw.randrange(2)}.\nSo the answer is {a + b}.<|im_end|>"
    )
    texts = [said[i : i + 4] for i in range(0, len(said), 4)]
    policy = [1] * len(texts)
    if tool:
        told = ["<|im_end|>\n", "<|im_start|>tool\n", "42 <b>rows</b>", "<|im_end|>\n", "<|im_start|>assistant\n"]
        texts, policy = [*texts, *told, "The tool ", "agrees."], [*policy, *[0] * len(told), 1, 1]
    good = draw.random() < 0.5
    advantage = 0.8 if good else -0.6
    diffs = [draw.gauss(0, 0.02) * part for part in policy]
    values = {
        "step": step,
        "kind": "training",
        "rollout": "rollout",
        "row": row,
        "group": step * 2 + row // 4,
        "prompt": CHAT.format(a, b),
        "images": [],
        "response": "".join(texts),
        "reward": float(good),
        "advantage": advantage,
        "finish": draw.choice(["stop", "stop", "length"]),
        "prompt_tokens": 24,
        "response_tokens": sum(policy),
        "version_min": max(step - 1, 0),
        "version_max": max(step - 1, 0) + (row % 3 == 0),
        "log_prob_diff": math.fsum(diffs) / max(sum(policy), 1),
        "columns": {"answers": str(a + b), "format": 0.5},
        "token_texts": texts,
        "token_ids": list(range(len(texts))),
        "token_policy": policy,
        "token_trained": [int(place != 3) for place in range(len(texts))],
        "token_rewards": [0.25 if place == len(texts) - 1 else 0.0 for place in range(len(texts))] if tool else [],
        "token_advantages": [advantage * part for part in policy],
        "token_versions": [max(step - 1, 0)] * len(texts),
        "token_log_probs": [-abs(draw.gauss(0, 1)) * part for part in policy],
        "token_log_prob_diffs": diffs,
    }
    assert values.keys() == FIELDS.keys()
    return values


def write(folder: Path, samples: list[dict[str, Any]]) -> Path:
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in samples)
    (folder / "samples" / "samples-00000.jsonl").write_text(lines, encoding="utf-8")
    return folder
