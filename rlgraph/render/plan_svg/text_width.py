"""Estimate the width of a text in any sans-serif font, as an upper bound, since the fonts of the reader's machine are unknown.

Widths are classes of em, at least as wide as in Arial, DejaVu Sans and Verdana, which browsers fall back to.
"""

import unicodedata
from collections.abc import Mapping

_REGULAR = {
    0.37: "'ijlf .,",
    0.46: 'It()[]/\\:;!-r"|·',
    0.56: "cszL?J",
    0.60: "kvxy",
    0.64: "abdeghnopquFT0123456789_$*{}`",
    0.73: "ABCEKPRSVXYZ",
    0.80: "DGHNOQU&",
    0.87: "wM#+<=>^~",
    1.00: "mW…",
    1.08: "%@",
}
_BOLD = {
    0.38: "'il .,",
    0.44: "jf",
    0.50: "rt-!:;",
    0.56: "IJ()[]|·",
    0.60: "csz",
    0.69: "aekovxyLTF/\\?",
    0.72: 'bdghnpqu0123456789_$*{}"`',
    0.78: "ABCEKPRSVXYZ",
    0.88: "DGHNOQU&#+<=>^~",
    1.00: "wM…",
    1.13: "mW@",
    1.28: "%",
}
_OTHER, _WIDE = 1.5, 1.6  # characters of other scripts, and those that take two places in a terminal

ROUNDING = 1e-6  # pixels: tolerance for sums of floats, so that a text fits the room made for it


def _by_char(classes: Mapping[float, str]) -> dict[str, float]:
    return {char: em for em, chars in classes.items() for char in chars}


_EM = {False: _by_char(_REGULAR), True: _by_char(_BOLD)}


def width(text: str, size: float, bold: bool = False) -> float:
    """Bound the width in pixels of `text` at a font size of `size` pixels."""
    return size * sum(_em(char, bold) for char in text)


def _em(char: str, bold: bool) -> float:
    if char in _EM[bold]:
        return _EM[bold][char]
    return _WIDE if unicodedata.east_asian_width(char) in "WF" else _OTHER


def fitted(text: str, size: float, room: float, bold: bool = False) -> str:
    """Cut `text` off with an ellipsis if it is wider than `room` pixels."""
    if width(text, size, bold) <= room + ROUNDING:
        return text
    kept = text
    while kept and width(kept + "…", size, bold) > room + ROUNDING:
        kept = kept[:-1]
    return kept.rstrip() + "…"
