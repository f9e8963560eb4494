"""The width estimate is an upper one, and what is cut off fits."""

from hypothesis import given
from hypothesis import strategies as st

from rlgraph.render.plan_labels import fit_text, width

# Advance widths in em of the widest common sans-serif fonts, from their horizontal metrics tables.
DEJAVU = {"i": 0.278, "m": 0.974, "a": 0.613, "0": 0.636, "_": 0.5, ".": 0.318, "W": 0.989, "%": 0.95, " ": 0.318, "~": 0.838, "r": 0.411}
VERDANA = {
    "i": 0.274,
    "m": 0.973,
    "a": 0.601,
    "0": 0.636,
    "_": 0.636,
    ".": 0.364,
    "W": 0.989,
    "%": 1.076,
    " ": 0.352,
    "~": 0.818,
    "r": 0.427,
}


def test_no_character_is_wider_in_a_common_font() -> None:
    for font in (DEJAVU, VERDANA):
        assert all(width(char, 1.0) >= em for char, em in font.items())


def test_bold_is_never_narrower() -> None:
    assert all(width(chr(code), 10.0, bold=True) >= width(chr(code), 10.0) for code in range(32, 127))


@given(st.text(max_size=60), st.floats(30, 400), st.booleans())
def test_fitted_text_fits_and_whole_text_is_left_alone(text: str, room: float, bold: bool) -> None:
    kept = fit_text(text, 12.0, room, bold)
    assert width(kept, 12.0, bold) <= room + 1e-5
    assert kept == text or (kept.endswith("…") and text.startswith(kept[:-1]))
    assert (kept == text) == (width(text, 12.0, bold) <= room + 1e-6) or text.endswith("…")
