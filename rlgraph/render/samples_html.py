"""The browser of samples in a report: the data as JSON that no response can break out of; the page's script draws it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlgraph.analysis.samples import LINES, Sample, read_file, sample_files

SHOWN_BYTES = 6 << 20  # of samples in a page
BLOCKS = 12  # places of a long run from which samples are shown

RANGES = (("step", "first", "last"), ("reward", "least", "most"), ("tokens", "least", "most"), ("version", "oldest", "newest"))
SORTS = {
    "newest": "newest step",
    "oldest": "oldest step",
    "best": "highest reward",
    "worst": "lowest reward",
    "longest": "longest",
    "shortest": "shortest",
    "off": "log-probs furthest apart",
}
COLOURS = {"advantage": "advantage", "diff": "difference of log-probs", "log_prob": "log-prob", "version": "version", "none": "nothing"}


def samples_section(folder: Path) -> Iterator[str]:
    """Yield the HTML of the browser of the samples in a run's folder."""
    shown, whole = shown_samples(folder)
    where = "All of them are shown" if whole else "Those of a few places of the run are shown"
    yield f"<p>Responses of the policy, trained on or answers of evaluations. {where}; the files are in <code>samples/</code>.</p>"
    yield f'<div id="filters">{"".join(_controls())}</div>'
    yield '<p id="found" class="muted"></p><div id="samples-list"></div><div id="sample"></div>'
    yield f'<script type="application/json" id="sample-data">{as_script(shown)}</script>'


def _controls() -> Iterator[str]:
    for name, least, most in RANGES:
        fields = (
            f'<input name="{name}-{end}" type="number" step="any" placeholder="{said}"/>'
            for end, said in (("least", least), ("most", most))
        )
        yield f"<label>{name} <span>{' to '.join(fields)}</span></label>"
    yield _select("kind", "kind", {"": "all", "training": "trained on", "evaluation": "of evaluations"})
    yield _select("ended by", "finish", {"": "any reason"})
    yield '<label>text <input name="text" type="search" placeholder="in prompt or response"/></label>'
    yield _select("sort by", "sort", SORTS)
    yield _select("colour tokens by", "colour", COLOURS)


def _select(label: str, name: str, choices: Mapping[str, str]) -> str:
    options = "".join(f'<option value="{value}">{said}</option>' for value, said in choices.items())
    return f'<label>{label} <select name="{name}">{options}</select></label>'


def as_script(value: object) -> str:
    """Write a value as JSON for a script element: no text in it can end the element, begin markup, or be no XML.

    >>> as_script("</script>&é")
    '"\\\\u003c/script\\\\u003e\\\\u0026\\\\u00e9"'
    """
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.replace("\x7f", "\\u007f")


def shown_samples(folder: Path, most_bytes: int = SHOWN_BYTES) -> tuple[list[Sample], bool]:
    """Choose the samples that a page shows: all, or blocks from places evenly spread over the files; and whether they are all."""
    files = sample_files(folder)
    sizes = [path.stat().st_size for path in files]
    if sum(sizes) <= most_bytes:
        return [sample for path in files for sample in read_file(path)], True
    budget = most_bytes // BLOCKS
    found: dict[tuple[int, str, int], Sample] = {}
    for block in range(BLOCKS):
        place = (sum(sizes) - budget) * block // (BLOCKS - 1)
        for path, size in zip(files, sizes, strict=True):
            if place < size:
                for sample in _block(path, place, size, budget):
                    found[sample["step"], sample["rollout"], sample["row"]] = sample
                break
            place -= size
    return [found[key] for key in sorted(found)], False


def _block(path: Path, place: int, size: int, budget: int) -> Sequence[Sample]:
    """Read about `budget` bytes of a file from a place on; one sample at least, however long it is."""
    if path.suffix != LINES:
        samples = list(read_file(path))
        share = max(len(samples) * budget // size, 1)
        first = min(len(samples) * place // size, len(samples) - share)
        return samples[first : first + share]
    found: list[Sample] = []
    with path.open("rb") as lines:
        lines.seek(place)
        if place:
            lines.readline()
        for line in lines:
            if (found and lines.tell() - place > budget) or not line.endswith(b"\n"):
                break
            found.append(json.loads(line))
    return found
