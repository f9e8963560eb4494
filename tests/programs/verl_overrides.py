"""Reads the settings of verl's example scripts for text models from a checkout of verl, as facts that a test compares with.

python tests/programs/verl_overrides.py CHECKOUT tests/oracle/verl_overrides.json
"""

import json
import os
import re
import sys
from pathlib import Path

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.script import read_call

FOLDERS = ("examples", "verl/experimental/one_step_off_policy", "verl/experimental/fully_async_policy")
# Pictures and sounds, other hardware, other trainers and engines than FSDP, Megatron-Core, vLLM and SGLang, and families that see.
LEFT_OUT = (
    *("ascend", "npu", "_vl", "vlm", "geo3k", "minicpm", "video", "openr1", "glm4_1v", "qwen3_5", "qwen35"),
    *("veomni", "automodel", "torchtitan", "mindspeed", "trtllm", "_lite", "turbo", "generation", "deepseek_v4"),
)
NEEDED = ("MODEL_PATH", "RAY_DATA_HOME", "ckpts_home", "LORA_ADAPTER_PATH", "PYTHONPATH")  # that some scripts want to be set


def main(checkout: str, out: str) -> None:
    os.environ |= {name: f"/{name.lower()}" for name in NEEDED} | {"HOME": "/home/me"}
    scripts, texts = {}, {}
    for path in sorted(each for folder in FOLDERS for each in (Path(checkout) / folder).rglob("*.sh")):
        name = str(path.relative_to(checkout))
        if any(part in name.lower() for part in LEFT_OUT):
            continue
        takes_arguments = re.search(r'\$#|"\$1|=\$1', path.read_text(encoding="utf-8"))
        try:
            call = read_call(path, ["8", "checkpoints"] if takes_arguments else [])
        except ConfigError as error:
            print(f"left out: {name}: {error}")
            continue
        said = [each.text.replace(os.getcwd(), "/home/me") for each in call.settings]  # the folder that it runs in is none of verl's
        settings = [texts.setdefault(text, len(texts)) for text in said]
        scripts[name.removesuffix(".sh")] = {"module": call.module, "config": call.config, "settings": settings}
    lines = [json.dumps([*texts], indent=0), ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in scripts.items())]
    Path(out).write_text(f'{{"settings": {lines[0]},\n"scripts": {{\n{lines[1]}\n}}}}\n', encoding="utf-8")
    print(f"{len(scripts)} scripts, {sum(len(each['settings']) for each in scripts.values())} settings, {len(texts)} of them different")


if __name__ == "__main__":
    main(*sys.argv[1:])
