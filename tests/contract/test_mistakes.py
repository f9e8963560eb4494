"""What a new user gets wrong is answered at once: by class, stage and words, with the rule and the fix, and nothing stays behind."""

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from support.mistakes_beyond_rl import MISTAKES as BEYOND_RL
from support.tiny import tiny_llama
from support.user_mistakes import MISTAKES as PLAIN
from support.user_mistakes import SECONDS

MISTAKES = PLAIN | BEYOND_RL
HEAVY = {"vllm", "sglang"}  # no mistake waits for an engine to be imported
MOST_CHARACTERS = 1500  # of the first line of an error: no value is printed whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def children() -> set[str]:
    found = set[str]()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found |= set(task.read_text().split())
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_class_stage_and_words(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda **given: pytest.fail("Ray was started"))  # an earlier test may have left its own
    loaded = sys.modules.keys() & HEAVY  # by an earlier test of this process
    before, start = children(), time.monotonic()
    with pytest.raises(mistake.error) as caught:  # a warning is an error in tests
        mistake.make(model)
    assert time.monotonic() - start < SECONDS[mistake.stage]
    assert mistake.words in str(caught.value)
    assert len(str(caught.value).splitlines()[0]) < MOST_CHARACTERS
    assert children() <= before
    assert sys.modules.keys() & HEAVY == loaded
