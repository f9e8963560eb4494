"""Changes to an unpacked verl 0.9.1 without which it would be slower than it has to be: each one favours verl.

python benchmarks/peers/patches.py SITE
"""

import sys
from pathlib import Path

MARK = "# patched for the comparison"
CROSS_ENTROPY = f"""    elif True:  {MARK}
        flat = -F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction="none")
        output = flat.view(logits.shape[:-1])
    else:
        output = logprobs_from_logits_v2(logits, labels)
    return output
"""

# file below verl/, the text that is there once, what stands for it
PATCHES = (
    # Without flash-attn, which has no build for this torch, verl loops in Python over rows, and a row of packed logits is one token.
    (
        "utils/torch_functional.py",
        "    else:\n        output = logprobs_from_logits_v2(logits, labels)\n    return output\n",
        CROSS_ENTROPY,
    ),
)


def patch(site: Path) -> None:
    """Apply each patch once; raises SystemExit where verl's text is another one."""
    for name, old, new in PATCHES:
        file = site / "verl" / name
        text = file.read_text(encoding="utf-8")
        if new in text:
            continue
        if text.count(old) != 1:
            raise SystemExit(f"{file}: the text to patch stands there {text.count(old)} times instead of once; is this verl 0.9.1?")
        file.write_text(text.replace(old, new), encoding="utf-8")
        print(f"patched {file}")


if __name__ == "__main__":
    patch(Path(sys.argv[1]))
