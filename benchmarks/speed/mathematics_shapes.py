"""`recipes/mathematics.py`, unchanged, on models of other shapes: seconds of a step on one GPU, models in turns.

    python benchmarks/speed/mathematics_shapes.py 0.6B 4B [--steps 6] [--json OUT.json]
    python benchmarks/speed/mathematics_shapes.py toy --smoke     # two steps, on a CPU

Weights are random and the chat template is Qwen 3's, so nothing is learned: what is shown is that the script runs at these sizes.
"""

import json
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.shapes import random_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import mathematics  # noqa: E402 (of recipes/)


def with_template(shape: str, work: Path) -> str:
    """Make a model of that shape whose tokenizer has Qwen 3's chat template."""
    from transformers import AutoTokenizer

    folder = random_model(shape, work)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (ROOT / "tests/support/chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return folder


def run(shape: str, work: Path, steps: int, settings: list[str]) -> dict[str, Any]:
    own = [f"model={with_template(shape, work)}", "shared=true", "depth=0", "max_context=400", "thinking=false"]
    cfg = rg.config(mathematics.Config, [*own, f"steps={steps}", f"every={steps}", *settings])
    plan = rg.compile(mathematics.graph(cfg), rg.local_cluster())
    with plan.launch(deadline_s=300) as job:
        steps_of = []
        for step in job.steps(steps):
            print(f"  {shape}: step {step.index + 1} took {step.seconds:.2f} s", flush=True)
            steps_of.append(step)
    seconds = [step.seconds for step in steps_of]
    found = {"step_s": statistics.median(seconds[2:] or seconds), "steps_s": seconds, "predicted_s": plan.prediction.step_s}
    return found | {"finite": all(step.metrics["actor/grad_norm"] > 0 for step in steps_of if step.metrics["critic/rewards/max"] > 0)}


def main() -> None:
    parser = command_line(__doc__, smoke="a tiny model")
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    small = ["prompts=2", "group_size=2", "questions=4", "engine=transformers"] if given.smoke else ["prompts=16", "max_tokens=64"]
    results: dict[str, Any] = {}
    for shape in given.shapes:
        try:
            results[shape] = run(shape, Path("runs/mathematics_shapes").resolve(), 2 if given.smoke else given.steps, small)
        except Exception:  # noqa: BLE001 (the others run)
            results[shape] = {"error": traceback.format_exc()[-2000:]}
        print(shape, json.dumps(results[shape]), flush=True)
    write_measured(given.json, results)


if __name__ == "__main__":
    main()
