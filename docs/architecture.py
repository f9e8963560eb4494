"""Draw the packages of rlgraph, what each may import and what it does import.

python docs/architecture.py FILE.svg

The layers are those that import-linter checks (`pyproject.toml`); the imports are read from the source.
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # it draws the package beside it, whichever is installed
LIBRARIES = ("torch", "transformers", "vllm", "ray")
CELL, NAMES, HEAD, GAP = 24, 116, 96, 18  # pixels: a cell, the names at the left, the names on top, the gap before the libraries
ALLOWED, IMPORTED, LIBRARY = "#e8eef6", "#2f6fb5", "#b8622a"


Pairs = set[tuple[str, str]]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def layers() -> list[list[str]]:
    """The packages and modules of each layer, top layer first."""
    ordered = next(contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    return [layer.replace("|", ":").replace(" ", "").split(":") for layer in ordered]


def allowed() -> Pairs:
    """Pairs of packages of which the first may import the second: a lower layer, a sibling after a colon, and no contract forbids it."""
    pairs = set()
    ordered = next(contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    for k, (layer, names) in enumerate(zip(ordered, layers(), strict=True)):
        below = {name for lower in layers()[k + 1 :] for name in lower} | (set(names) if ":" in layer else set())
        pairs |= {(name, other) for name in names for other in below if name != other}
    for contract in (contract for contract in CONTRACTS if contract["type"] == "forbidden"):
        given = {(_package(a), _package(b)) for a in contract["source_modules"] for b in contract["forbidden_modules"] if b.count(".") == 1}
        pairs -= given
    return pairs


def import_graph(*, types: bool = False) -> grimp.ImportGraph:
    """Read which module imports which module or library, with `types` the imports for the type checker too."""
    return grimp.build_graph("rlgraph", include_external_packages=True, exclude_type_checking_imports=not types, cache_dir=None)


def imports() -> Pairs:
    """Pairs of a package and a package or library that it imports, imports inside functions included."""
    graph, pairs = import_graph(), set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pairs.add((_package(importer), _package(imported)))
    return {(a, b) for a, b in pairs if a != b}


def _package(module: str) -> str:
    """`rlgraph.channels.host.channel` → `channels`; `ray.dag` → `ray`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "rlgraph" and len(parts) > 1 else parts[0]


def svg(ordered: Sequence[Sequence[str]], may: Pairs, found: Pairs) -> str:
    """Draw a matrix: a row imports the columns whose cells are filled; a pale cell would be allowed too."""
    from rlgraph.render.plan_picture import IN_THE_DARK

    names = [name for layer in ordered for name in layer]
    depth = {name: k for k, layer in enumerate(ordered) for name in layer}
    right = NAMES + CELL * len(names) + GAP
    width, height = right + CELL * len(LIBRARIES) + 40, HEAD + CELL * len(names) + 44
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Inter, \'Segoe UI\', \'Helvetica Neue\', Arial, sans-serif" font-size="13" role="img" '
        'aria-label="the packages of rlgraph and their imports">',
        IN_THE_DARK,
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    columns = {name: NAMES + CELL * k for k, name in enumerate(names)} | {name: right + CELL * k for k, name in enumerate(LIBRARIES)}
    for name, x in columns.items():
        out.append(f'<text transform="translate({x + CELL / 2 + 4:g} {HEAD - 8}) rotate(-60)" fill="#333">{name}</text>')
    for row, name in enumerate(names):
        y = HEAD + CELL * row
        if row and depth[name] != depth[names[row - 1]]:
            out.append(f'<path d="M8 {y}H{width - 40}" stroke="#d5dae0"/>')
        out.append(f'<text x="{NAMES - 10}" y="{y + 17}" text-anchor="end" fill="#111">{name}</text>')
        for other, x in columns.items():
            colour = _colour((name, other), may, found)
            if colour:
                out.append(f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" rx="3" fill="{colour}">')
                out.append(f"<title>{name} {'imports' if (name, other) in found else 'may import'} {other}</title></rect>")
    out += _legend(height - 24)
    return "\n".join([*out, "</svg>", ""])


def _colour(pair: tuple[str, str], may: Pairs, found: Pairs) -> str | None:
    if pair in found:
        return LIBRARY if pair[1] in LIBRARIES else IMPORTED
    return ALLOWED if pair in may else None


def _legend(y: int) -> list[str]:
    out, x = [], 12
    for colour, words, wide in (
        (IMPORTED, "the row imports the column", 190),
        (ALLOWED, "allowed, and not used", 160),
        (LIBRARY, "it imports the library", 150),
    ):
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 12}" fill="#333">{words}</text>')
        x += 20 + wide
    return out


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(layers(), allowed(), imports()))
