"""Images of prompts: as messages and fields of rows hold them, in the column `prompt_images`, with errors before anything starts."""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import rlgraph as rg
from rlgraph.data.streams import StreamReader
from rlgraph.errors import DataError
from rlgraph.nodes.prompts import Prompts

Row = dict[str, Any]


def encoded(color: int, kind: str = "PNG", **options: Any) -> bytes:
    """A small image of one color as the bytes of a file."""
    written = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 0, 0)).save(written, kind, **options)
    return written.getvalue()


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


RED, DARK = encoded(255), encoded(64)
JPEG = encoded(255, "JPEG")


def asked(*content: Any) -> list[Row]:
    return [{"role": "user", "content": list(content)}]


def text(written: str) -> Row:
    return {"type": "text", "text": written}


IMAGE = {"type": "image"}


def source(data: Any, **options: Any) -> Prompts:
    made = rg.prompts(data, 1, **options).node.operation
    assert isinstance(made, Prompts)
    return made


def columns(row: Row) -> tuple[list[Any], list[str]]:
    """The contents of the messages that a row becomes, and its images."""
    made = source([row]).batch(0)
    messages = json.loads(str(made["prompt_messages"][0]))["messages"]
    return [message["content"] for message in messages], json.loads(str(made["prompt_images"][0]))


KINDS: dict[str, tuple[Any, str]] = {
    "bytes": (RED, url(RED)),
    "a JPEG": (JPEG, url(JPEG, "jpeg")),
    "a WebP": (encoded(9, "WEBP"), url(encoded(9, "WEBP"), "webp")),
    "a GIF": (encoded(9, "GIF"), url(encoded(9, "GIF"), "gif")),
    "a row of parquet": ({"bytes": RED, "path": None}, url(RED)),
    "a data URL": (url(JPEG, "jpeg"), url(JPEG, "jpeg")),
    "a mapping of verl's": ({"image": RED}, url(RED)),
}


@pytest.mark.parametrize(("image", "expected"), [pytest.param(*case, id=name) for name, case in KINDS.items()])
def test_an_image_keeps_the_bytes_of_its_file(image: Any, expected: str) -> None:
    assert columns({"prompt": "What is this?", "image": image})[1] == [expected]


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L", "P"])
def test_an_image_of_pil_becomes_png(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    [found] = columns({"prompt": "What is this?", "image": image})[1]
    opened = Image.open(io.BytesIO(base64.b64decode(found.partition(",")[2])))
    assert (opened.format, opened.size, opened.convert("RGB").getpixel((0, 0))) == ("PNG", (8, 8), (255, 255, 255))


def test_an_array_becomes_png_and_an_array_of_images_is_a_list() -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    [found] = columns({"prompt": "What is this?", "image": pixels})[1]
    assert Image.open(io.BytesIO(base64.b64decode(found.partition(",")[2]))).size == (3, 2)
    several = np.array([{"bytes": RED}, {"bytes": DARK}], dtype=object)  # as pandas reads parquet
    assert columns({"prompt": "What are these?", "images": several})[1] == [url(RED), url(DARK)]


# Each row is a prompt with one image or two, with the contents that its messages get.
PLACES: dict[str, tuple[Row, list[Any], list[bytes]]] = {
    "parts with images": (
        {"prompt": asked({**IMAGE, "image": RED}, text("and"), {**IMAGE, "url": url(DARK)})},
        [[IMAGE, text("and"), IMAGE]],
        [RED, DARK],
    ),
    "OpenAI's parts": (
        {"prompt": asked(text("A"), {"type": "image_url", "image_url": {"url": url(RED), "detail": "low"}}, text("B"))},
        [[text("A"), IMAGE, text("B")]],
        [RED],
    ),
    "OpenAI's short parts": ({"prompt": asked({"type": "image_url", "image_url": url(RED)})}, [[IMAGE]], [RED]),
    "verl's marks": (
        {"prompt": [{"role": "user", "content": "<image>Is it in <image>?"}], "images": [{"bytes": RED}, {"bytes": DARK}]},
        [[IMAGE, text("Is it in "), IMAGE, text("?")]],
        [RED, DARK],
    ),
    "marks in two messages": (
        {
            "prompt": [
                {"role": "user", "content": "<image>"},
                {"role": "assistant", "content": "Red."},
                {"role": "user", "content": "<image>?"},
            ],
            "images": [RED, DARK],
        },
        [[IMAGE], "Red.", [IMAGE, text("?")]],
        [RED, DARK],
    ),
    "a text with a mark": ({"prompt": "Is <image> red?", "image": RED}, [[text("Is "), IMAGE, text(" red?")]], [RED]),
    "TRL's parts are filled, and their text is not searched": (
        {"prompt": asked(IMAGE, text("an <image>"), IMAGE), "images": [RED, DARK]},
        [[IMAGE, text("an <image>"), IMAGE]],
        [RED, DARK],
    ),
    "TRL's messages of text": (
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Red?"}], "images": [RED, DARK]},
        ["Be brief.", [IMAGE, IMAGE, text("Red?")]],
        [RED, DARK],
    ),
    "text": ({"prompt": "Red?", "image": RED, "images": None}, [[IMAGE, text("Red?")]], [RED]),
    "a part with its image, and one of the field": (
        {"prompt": asked(IMAGE, {**IMAGE, "image": DARK}), "image": RED},
        [[IMAGE] * 2],
        [RED, DARK],
    ),
}


@pytest.mark.parametrize(("row", "contents", "images"), [pytest.param(*case, id=name) for name, case in PLACES.items()])
def test_images_stand_in_their_places(row: Row, contents: list[Any], images: list[bytes]) -> None:
    assert columns(row) == (contents, [url(image) for image in images])


def test_a_row_without_images_has_an_empty_list_and_keeps_its_text() -> None:
    rows = [
        {"prompt": "Red?", "image": RED, "answer": "yes"},
        {"prompt": [{"role": "user", "content": [text("Not an"), text("<image>")]}], "answer": "no"},
        {"prompt": "Nor here", "image": None, "answer": "no"},
    ]
    made = rg.prompts(rows, 3)
    assert made.columns == ("prompt_texts", "prompt_messages", "prompt_images", "prompt_ids", "answers")
    found = source(rows).columns(rows)
    assert found["prompt_images"] == [json.dumps([url(RED)]), "[]", "[]"]
    assert found["prompt_texts"] == ["Red?", "Not an\n<image>", "Nor here"]
    assert json.loads(str(found["prompt_messages"][1]))["messages"] == [{"role": "user", "content": "Not an\n<image>"}]


def test_the_text_of_a_prompt_with_images_is_its_parts_of_text() -> None:
    row = {"prompt": asked(text("A"), {**IMAGE, "image": RED}, text("B"))}
    assert source([row], chat=rg.options.Chat(system="Be brief.")).batch(0)["prompt_texts"] == ["A\nB"]


# Files: relative paths begin in the folder of the file, whatever the working directory is when a row is drawn.


def written(folder: Path, suffix: str, rows: list[Row]) -> Path:
    file = folder / f"train.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    return file


def verl_row(**changed: Any) -> Row:
    return {"prompt": [{"role": "user", "content": "<image>Red?"}], "reward_model": {"ground_truth": "yes"}, **changed}


READERS: dict[str, tuple[Callable[[Path], Any], Row]] = {
    "verl": (rg.data.verl, verl_row(images=["pictures/a.png"])),
    "verl, as mappings": (rg.data.verl, verl_row(images=[{"path": "pictures/a.png"}])),
    "conversational": (rg.data.conversational, {"prompt": [{"role": "user", "content": "Red?"}], "image": "pictures/a.png"}),
    "messages": (rg.data.conversational, {"messages": asked({**IMAGE, "path": "pictures/a.png"}, text("Red?"))}),
    "fields": (
        lambda file: (rg.data.parquet if file.suffix == ".parquet" else rg.data.jsonl)(file, images="extra.pictures"),
        {"prompt": "Red?", "extra": {"pictures": ["pictures/a.png"]}},
    ),
    "a mixture": (
        lambda file: rg.data.mix({"a": rg.data.conversational(file), "b": rg.data.conversational([file, file])}, {"a": 1, "b": 1}),
        {"prompt": "Red?", "images": ["pictures/a.png"]},
    ),
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize(("reader", "row"), [pytest.param(*case, id=name) for name, case in READERS.items()])
def test_a_relative_path_begins_in_the_folder_of_its_file(
    suffix: str, reader: Callable[[Path], Any], row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data/pictures").mkdir(parents=True)
    (tmp_path / "data/pictures/a.png").write_bytes(RED)
    written(tmp_path / "data", suffix, [row])
    monkeypatch.chdir(tmp_path)
    made = pickle.loads(pickle.dumps(source(reader(Path("data") / f"train.{suffix}"))))
    monkeypatch.chdir("/")  # as of a worker
    made.check(rg.prompts([{"prompt": "a"}], 1).node)
    assert made.batch(0)["prompt_images"] == [json.dumps([url(RED)])]


@pytest.mark.parametrize("path", [Path("a.png"), "a.png", "{}/a.png", "file://{}/a.png"])
def test_another_relative_path_begins_in_the_working_directory(path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    monkeypatch.chdir(tmp_path)
    image = path.format(tmp_path) if isinstance(path, str) else path
    assert columns({"prompt": "Red?", "image": image})[1] == [url(RED)]


def test_images_of_parquet_are_read(tmp_path: Path) -> None:
    rows = rg.data.verl(written(tmp_path, "parquet", [verl_row(images=[{"bytes": RED, "path": None}])]))
    assert source(rows).batch(0)["prompt_images"] == [json.dumps([url(RED)])]


@pytest.mark.parametrize("decode", [True, False])
def test_images_of_datasets_are_read(decode: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image(decode=decode)]})
    data = datasets.Dataset.from_list([{"prompt": "Red?", "images": [{"bytes": RED, "path": None}]}], features=features)
    [found] = json.loads(str(source(data).batch(0)["prompt_images"][0]))
    assert Image.open(io.BytesIO(base64.b64decode(found.partition(",")[2]))).getpixel((0, 0)) == (255, 0, 0)
    assert decode or found == url(RED)


# Rows are read when they are drawn, and all are checked before.


def test_an_image_is_read_when_its_row_is_drawn(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.png" for n in range(3)]
    for file in files:
        file.write_bytes(RED)
    rows = [{"prompt": f"{n}?", "image": file} for n, file in enumerate(files)]
    made = source(rows)
    made.check(rg.prompts([{"prompt": "a"}], 1).node)
    drawn = int(made.order.row(0))
    for n, file in enumerate(files):
        file.write_bytes(DARK) if n == drawn else file.unlink()
    assert made.batch(0)["prompt_images"] == [json.dumps([url(DARK)])]
    with pytest.raises(
        DataError, match=rf"item {made.order.row(1)} of the data set: image 0 is '.*{made.order.row(1)}.png', which cannot be read"
    ):
        made.batch(1)


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header has this size."""
    head = RED[12:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + RED[24:29]
    return RED[:12] + head + zlib.crc32(head).to_bytes(4, "big") + RED[33:]


def animated(kind: str) -> bytes:
    frames, made = [Image.new("RGB", (8, 8), (n * 90, 0, 0)) for n in range(2)], io.BytesIO()
    frames[0].save(made, kind, save_all=True, append_images=frames[1:])
    return made.getvalue()


BROKEN = "image 0 is broken, cut off or not an image"
WRONG: dict[str, tuple[Any, str]] = {
    "a missing file": ("none.png", r"image 0 is 'none.png', which cannot be read \(.*No such file.*: correct the path"),
    "a folder": ("/", "image 0 is '/', which cannot be read"),
    "a text file": (b"hello", f"{BROKEN}; replace the image, or leave the row out"),
    "no bytes": (b"", BROKEN),
    **{f"a {kind} that is cut off": (encoded(255, kind)[:-9], BROKEN) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    "a progressive JPEG that is cut off": (encoded(255, "JPEG", progressive=True)[:-9], BROKEN),
    "changed bytes": (RED[:45] + b"xy" + RED[47:], BROKEN),
    **{f"an animated {kind}": (animated(kind), "image 0 has 2 frames; .*save the frame") for kind in ("GIF", "WEBP", "PNG")},
    **{f"an image of 8000 x {n}": (png_of(8000, n), "image 0 has more than 64 million pixels") for n in (8001, 12_000, 90_000)},
    "a web address": ("https://example.org/a.png", "image 0 is 'https://example.org/a.png'; nothing is downloaded .*: download it"),
    "a data URL of text": ("data:image/png,abc", "image 0 is 'data:image/png,abc' .*; a data URL is 'data:image/png;base64,'"),
    "a number": (7, "image 0 is 7; an image is a path, bytes"),
    "an empty mapping": ({"bytes": None, "path": None}, "image 0 is None; an image is a path, bytes"),
    "an array of floats": (np.zeros((2, 2, 3)), BROKEN),
}


@pytest.mark.parametrize(("image", "match"), [pytest.param(*case, id=name) for name, case in WRONG.items()])
def test_a_bad_image_is_an_error_before_anything_starts(image: Any, match: str) -> None:
    made = source([{"prompt": "Red?", "image": RED}, {"prompt": "Red?", "image": image}])
    with pytest.raises(DataError, match=f"item 1 of the data set: {match}"):
        made.check(rg.prompts([{"prompt": "a"}], 1).node)


def test_an_error_names_the_second_image_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(RED[:-9])
    row = {"prompt": "Red?", "images": [RED, tmp_path / "b.png"]}
    with pytest.raises(DataError, match=r"item 0 of the data set: image 1, '.*b.png', is broken"):
        rg.prompts([row], 1)


ROWS: dict[str, tuple[Row, str]] = {
    "more marks": ({"prompt": "<image> or <image>?", "image": RED}, "has 2 places for images in its messages, and 1 images"),
    "fewer marks": ({"prompt": "<image>?", "images": [RED, DARK]}, "has 1 places for images in its messages, and 2 images"),
    "a mark without images": ({"prompt": asked(text("<image>?")), "images": []}, "has 1 places .* 0 images .*write one '<image>'"),
    "a part without an image": ({"prompt": asked(IMAGE)}, "has 1 places .* 0 images"),
    "more images than parts": ({"prompt": asked({**IMAGE, "image": RED}), "image": DARK}, "has 0 places .* 1 images"),
    "nobody asks": ({"prompt": [{"role": "system", "content": "Hi."}], "image": RED}, "has 0 places .* 1 images"),
    "both fields": ({"prompt": "Red?", "image": RED, "images": [RED]}, "has both 'images' and 'image'"),
    "a film": ({"prompt": asked({"type": "video", "video": "a.mp4"}), "image": RED}, "message 0 has content=.*'type': 'image'"),
}


@pytest.mark.parametrize(("row", "match"), [pytest.param(*case, id=name) for name, case in ROWS.items()])
def test_a_row_with_images_out_of_place_is_an_error(row: Row, match: str) -> None:
    with pytest.raises(DataError, match=f"item 0 of the data set.* {match}"):
        rg.prompts([row], 1)


@pytest.mark.parametrize("first", ["Red?", [{"role": "user", "content": "Red?"}]])
@pytest.mark.parametrize("later", [{"prompt": "Red?", "image": RED}, {"prompt": asked({**IMAGE, "image": RED})}])
def test_a_first_item_without_an_image_refuses_those_of_later_items(first: Any, later: Row) -> None:
    made = source([{"prompt": first}, later], chat=None if isinstance(later["prompt"], str) else rg.options.Chat())
    with pytest.raises(
        DataError, match="item 1 of the data set has an image, and the first item has none; put an item with an image first"
    ):
        made.check(rg.prompts([{"prompt": "a"}], 1).node)


def test_a_column_of_this_name_is_refused() -> None:
    with pytest.raises(DataError, match="would both become the column 'prompt_images'"):
        rg.prompts([{"prompt": "a", "prompt_image": "b"}], 1)


def test_rows_with_one_text_and_two_images_are_distinct() -> None:
    rows = rg.data.rows([{"prompt": "Red?", "image": name} for name in ("a.png", "b.png", "a.png")])
    assert [row["image"] for row in rows.distinct()] == ["a.png", "b.png"]


def test_a_stream_of_images_resumes() -> None:
    def pictures() -> Any:
        for n in range(4):
            yield {"prompt": f"{n}?", "image": Image.new("RGB", (8, 8))}

    assert rg.prompts(rg.data.stream(pictures), 1).columns[2] == "prompt_images"
    reader, other = StreamReader(rg.data.stream(pictures)), StreamReader(rg.data.stream(pictures))
    next(reader)
    other.load_state(reader.state())
    assert next(other)[1]["prompt"] == "1?"
