"""Reads the settings of TRL's scripts for text models from a checkout of TRL, as facts that a test compares with.

python tests/programs/trl_scripts.py CHECKOUT tests/oracle/trl_scripts.json

A training is a script with the flags of a command that its docstring, or the page of the command line, gives; or a whole example of the
pages of the three trainers.
"""

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlgraph.errors import ConfigError
from rlgraph_cli.from_trl.script import read_script
from rlgraph_cli.translate.settings import Unread

PAGES = ("grpo_trainer", "sft_trainer", "dpo_trainer")
PROCESSES = {"deepspeed_zero3": 8, "multi_gpu": 8}  # of the configurations of accelerate that commands name
# Pictures, an example that leaves out what it calls, and a command that TRL refuses: 8 completions in groups of 32.
LEFT_OUT = ("_vlm", "grpo_continuous_batching.py 0", "grpo_trainer 13", "sft_trainer 14", "dpo_trainer 9")


def main(checkout: str, out: str) -> None:
    root, trainings = Path(checkout), {}
    for name, path, flags in [*_of_scripts(root), *_of_pages(root)]:
        if any(part in name for part in LEFT_OUT):
            continue
        try:
            script = read_script(path, flags)
        except ConfigError as error:
            print(f"left out: {name}: {error}")
            continue
        settings = [[each.key, *([] if isinstance(each.value, Unread) else [each.value])] for each in script.settings]
        rewards = [[each.name, each.arguments if each.node else None] for each in script.rewards]
        data = script.train and {"taken": script.train.taken, "made": len(script.train.steps)}
        trainings[name] = {
            "kind": script.kind,
            "settings": settings,
            "rewards": rewards,
            "data": data,
            "validation": bool(script.evaluation),
        }
    text = json.dumps(trainings, default=str).replace(str(root.resolve()), "/trl").replace(str(root), "/trl")
    Path(out).write_text(text.replace('}, "', '},\n"') + "\n", encoding="utf-8")
    print(f"{len(trainings)} trainings, {sum(len(each['settings']) for each in trainings.values())} settings")


def _of_scripts(root: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield each script with each of its commands, or once without flags."""
    page = (root / "docs/source/clis.md").read_text(encoding="utf-8")
    for path in [
        *sorted((root / "examples/scripts").glob("*.py")),
        *(root / "trl/scripts" / f"{name}.py" for name in ("grpo", "sft", "dpo")),
    ]:
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\b(\w*)(GRPO|SFT|DPO)Trainer\(", text) or re.search(r"\bclass \w+\(OnlineDPO|AsyncGRPO", text):
            continue
        said = text.replace("\n# ", "\n").replace("\n#", "\n")
        commands = [*re.finditer(r"(?:accelerate launch|python) [^`]*?\.py((?: *\\\n[^`\n\\]*)+)", said)]
        flags = [(shlex.split(each[1].replace("\\\n", " ")), each[0]) for each in commands]
        if path.parent.name == "scripts" and path.parent.parent.name == "trl":
            flags += [
                (shlex.split(each[1].replace("\\\n", " ")), "") for each in re.finditer(rf"\ntrl {path.stem}((?: *\\\n[^`\n\\]*)+)", page)
            ]
        for number, (words, command) in enumerate(flags or [([], "")]):
            processes = next((str(count) for name, count in PROCESSES.items() if name in command), "1")
            yield f"{path.relative_to(root)} {number}", path, [*words, *(["--num_processes", processes] if processes != "1" else [])]


def _of_pages(root: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield each example of the pages that makes a trainer and leaves nothing out."""
    for page in PAGES:
        text = (root / f"docs/source/{page}.md").read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.S)):
            if re.search(r"\b(GRPO|SFT|DPO)Trainer\(", block) and "..." not in re.sub("#.*", "", block):
                with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
                    file.write(block)
                processes = ["--num_processes", "8"] if "slurm" in text.partition(block)[0][-2000:].lower() else []
                yield f"docs/source/{page} {number}", Path(file.name), processes


if __name__ == "__main__":
    main(*sys.argv[1:])
