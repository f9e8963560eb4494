"""Draw the plans that docs/beyond_rl.md shows: of each recipe beyond policy gradients, as it stands, with a tiny model on two cores.

python docs/draw_recipes.py FOLDER

A recipe of several graphs has one picture, of all of them in their order.
"""

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import rlgraph as rg
from rlgraph.render.plan_layout import layout
from rlgraph.render.plan_picture import IN_THE_DARK, svg
from rlgraph_cli.recipe import read

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = (
    "sft",
    "mixture",
    "dpo",
    "kto",
    "online_dpo",
    "distill",
    "teachers",
    "reward_model",
    "process_rewards",
    "curriculum",
    "self_play",
)


def plans(name: str, cluster: rg.Cluster) -> list[rg.Plan]:
    """Plan the graphs of a recipe with tiny models. Its engine is `transformers` on a cluster without GPUs, as on two cores."""
    recipe = read(RECIPES / f"{name}.py")
    known = recipe.config_class.__dataclass_fields__  # type: ignore[attr-defined]
    wanted = {"model": "tiny", "teacher": "tiny", "engine": "vllm" if cluster.gpus else "transformers"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # tiny models are made here
        return recipe.plans(recipe.configured([f"{key}={value}" for key, value in wanted.items() if key in known]), cluster, None)


def picture(made: Sequence[rg.Plan]) -> str:
    """Draw plans as one SVG document, one below the other."""
    if len(made) == 1:
        return svg(made[0])
    sizes = [(found.width, found.height) for found in map(layout, made)]
    width, height = max(wide for wide, _ in sizes), sum(high for _, high in sizes)
    said = ", then ".join(plan.graph for plan in made)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{said}">',
        IN_THE_DARK,
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    top = 0.0
    for plan, (_, high) in zip(made, sizes, strict=True):
        parts.append(svg(plan).replace("<svg ", f'<svg y="{top:g}" ', 1).rstrip())
        top += high
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for name in NAMES:
        Path(sys.argv[1], f"{name}.svg").write_text(picture(plans(name, rg.Cluster(cpus=2))), encoding="utf-8")
