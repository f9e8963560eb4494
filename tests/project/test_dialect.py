"""The words that readers of this field do not expect become fewer: no file has more of them than `dialect.json` leaves it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import dialect

TEXTS = dialect.texts()


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_has_no_more_words_of_our_dialect_than_before(name: str) -> None:
    found = dialect.places(TEXTS[name])
    assert len(found) <= dialect.left().get(name, 0), "\n".join(["write the field's words:", *found])


def test_places_are_found_in_prose_and_not_in_code() -> None:
    assert [place.partition("  ->  ")[2] for place in dialect.places("It takes a list. ```\ntakes\n``` `takes`\n>>> takes\n")] == [
        "accepts, requires, uses, lasts"
    ]


def test_no_file_is_listed_that_there_is_not() -> None:
    assert set(dialect.left()) <= set(TEXTS)
