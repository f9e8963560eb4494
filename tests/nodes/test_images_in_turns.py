"""Conversations with images, of prompts, tools and environments, on an engine that writes what a script says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support import seeing
from support.scripted_conversations import Rolled

import rlgraph as rg
from rlgraph.columns import FINISH_REASONS
from rlgraph.engines.hf.images import open_images, processor_of, read_images
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.environments.tools import ToolCalls

CALL = '<tool_call>{"name": "plot", "arguments": {}}</tool_call>'
POOL = rg.Pool("tools", cpus=1)
ROW = {"prompt": "<image>draw it", "images": [seeing.picture(1)]}


async def plot() -> list[dict[str, Any]]:
    """Plot it."""
    [drawn] = open_images(seeing.row(3))
    return [
        {"type": "text", "text": "seen "},
        {"type": "image_url", "image_url": {"url": seeing.picture(2)}},
        {"type": "image", "image": drawn},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.folder_of("idefics3", tmp_path_factory.mktemp("idefics3"))


def rolled(folder: Path, *, tool: Any = plot, **options: Any) -> Rolled:
    given = {} if "agent" in options else {"tools": rg.Tools([tool], pool=POOL)}
    script = lambda text: "done" if "tool: " in text or "more" in text else CALL  # noqa: E731
    return Rolled(folder, script, [ROW], close="<|end|>", **{"images": 3, "max_context": 500, "max_tokens": 200, **given, **options})


def encoded(folder: Path, turns: list[tuple[str, str]], urls: str) -> list[int]:
    """Encode turns as the model's template and processor do; a text has `<image>` in the place of each image."""
    text = "".join(f"{role}: {content}<|end|>" for role, content in turns) + "assistant: "
    [tokens] = processor_of(str(folder))(text=[text], images=[read_images(urls)], add_special_tokens=False)["input_ids"]
    return list(tokens)


def test_the_images_of_prompt_and_tool_are_read_as_template_and_processor_write_them_and_not_learnt(folder: Path) -> None:
    found = rolled(folder)
    urls = json.loads(found.columns["images"][0])
    assert urls[:2] == [seeing.picture(1), seeing.picture(2)]
    assert [image.tobytes() for image in read_images(found.columns["images"][0])] == [i.tobytes() for i in read_images(seeing.row(1, 2, 3))]
    first, second = found.engine.asked
    assert list(second.prompt) == encoded(
        folder, [("user", "<image>draw it"), ("assistant", CALL), ("tool", "seen <image><image>")], found.columns["images"][0]
    )
    assert [json.loads(each.images.urls) for each in (first, second)] == [urls[:1], urls]
    tokens, mask, own = (found.columns[name][0] for name in ("responses", "image_mask", "response_mask"))
    spans = [list(second.prompt[begin:end]) for begin, end in second.images.places]
    assert tokens[mask].tolist() == [token for span in spans[1:] for token in span]
    assert all(seeing.token_of(folder) in span for span in spans)
    assert not (mask & own).any()
    assert seeing.token_of(folder) not in tokens[~mask].tolist()
    assert second.sampling.max_tokens == 200 - (len(second.prompt) - len(first.prompt))


def test_one_image_too_many_ends_the_conversation(folder: Path) -> None:
    found = rolled(folder, images=2)
    assert found.metrics["tools/limit_images"] == len(found.engine.asked) == 1
    assert found.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("length")]
    assert json.loads(found.columns["images"][0]) == ROW["images"]


def test_an_image_without_room_is_left_out_whole(folder: Path) -> None:
    first, second = rolled(folder).engine.asked
    room = second.images.places[2][1] - 1 - len(first.prompt)
    found = rolled(folder, max_tokens=room)
    assert found.metrics["tools/limit_tokens"] == len(found.engine.asked) == 1
    assert len(json.loads(found.columns["images"][0])) == 2
    assert int(found.columns["image_mask"].sum()) == second.images.places[1][1] - second.images.places[1][0]
    assert found.columns["responses"].shape[1] == second.images.places[2][0] - len(first.prompt)


def test_a_generator_without_images_refuses_the_image_of_a_tool_and_names_it(folder: Path) -> None:
    with pytest.raises(GraphError, match=r"the tool 'plot' answered with an image; set Generator\(images=\)"):
        Rolled(
            folder,
            lambda text: CALL,
            [{"prompt": "draw"}],
            close="<|end|>",
            max_tokens=99,
            max_context=500,
            tools=rg.Tools([plot], pool=POOL),
        )


def test_a_text_with_the_mark_of_an_image_ends_the_conversation(folder: Path) -> None:
    async def plot() -> str:
        return "<image>"

    assert rolled(folder, tool=plot).metrics["tools/template_errors"] == 1


class Looks:
    """Asks with the images of the prompt, then shows another one, then ends."""

    def __init__(self, messages: list[rg.agents.Message]) -> None:
        self.messages, self.turns = messages, 0

    async def reset(self) -> list[rg.agents.Message]:
        return self.messages

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        self.turns += 1
        return rg.agents.Turn([rg.agents.Message("user", "more", images=open_images(seeing.row(4)))], done=self.turns == 2)

    async def close(self) -> None: ...


def test_an_environment_reads_the_images_of_its_prompt_and_shows_more(folder: Path) -> None:
    found = rolled(folder, agent=Looks)
    images = found.columns["images"][0]
    assert [image.tobytes() for image in read_images(images)] == [image.tobytes() for image in read_images(seeing.row(1, 4))]
    turns = [("user", "<image>draw it"), ("assistant", CALL), ("user", "<image>more")]
    assert list(found.engine.asked[1].prompt) == encoded(folder, turns, images)
    assert rolled(folder, agent=Looks, images=1).metrics["agent/limit_images"] == 1


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            [{"type": "image", "image": "data:image/png;base64,AAAA"}],
            "the answer of the tool 'plot': image 0, 'data:image/png;base64,AAAA', is broken, cut off",
        ),
        ([{"type": "image", "image": "none.png"}], "the answer of the tool 'plot': image 0 is 'none.png', which cannot be read"),
        ([{"type": "image"}], "the answer of the tool 'plot': image 0 is None; an image is a path"),
        ([{"type": "image", "image": seeing.picture(1)}, {"type": "text", "text": "<image>"}], "1 images, and 2 marks in its text"),
    ],
)
def test_a_broken_image_is_an_error_of_its_tool(result: Any, says: str) -> None:
    async def plot() -> Any:
        return result

    said = rg.agents.Message("assistant", CALL, tool_calls=(rg.agents.ToolCall("plot"),))
    turn = asyncio.run(ToolCalls(rg.Tools([plot], pool=POOL)).step(said))
    assert says in turn.messages[0].content
    assert turn.info == {"calls": 1, "failures": 1}


def test_a_text_that_looks_like_an_image_stays_a_text() -> None:
    """A program that the model wrote may print it, also where no image is read."""

    async def plot() -> str:
        return "data:image/png;base64,AAAA"

    said = rg.agents.Message("assistant", CALL, tool_calls=(rg.agents.ToolCall("plot"),))
    [answer] = asyncio.run(ToolCalls(rg.Tools([plot], pool=POOL)).step(said)).messages
    assert (answer.content, answer.images) == ("data:image/png;base64,AAAA", ())


def test_a_message_whose_images_have_other_places_is_refused() -> None:
    with pytest.raises(DataError, match="a message of role 'user' has 1 images, and 2 marks in its text"):
        rg.agents.Message("user", "<image>or<image>", images=[seeing.picture(1)])
