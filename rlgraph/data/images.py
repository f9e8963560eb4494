"""Images of a row of data: their places in its messages, their checks, and their bytes as data URLs. Pillow reads them."""

import base64
import io
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlgraph.conversions import dimensions
from rlgraph.errors import DataError, show_value

FIELDS = ("images", "image")  # of a row, next to its prompt
PARTS = ("image", "image_url")  # types of the parts of a message that are images
KEYS = ("bytes", "image", "image_url", "url", "path")  # of a mapping, the first of which that is not None holds the image
MARK = "<image>"  # the place of an image in a text of verl's
MOST_PIXELS = 64_000_000
THUMBNAIL = 192  # pixels of a side of an image in a record of samples
VERIFIED = ("PNG", "JPEG", "MPO", "WEBP")  # formats that Pillow checks, or that end with a mark, so that nothing is decoded
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")  # that PNG has


def unwrap_image(value: Any) -> Any:
    """Take the image out of a part of a message, or out of a mapping of parquet files and `datasets`; None if it holds none.

    >>> unwrap_image({"type": "image_url", "image_url": {"url": "a.png"}}), unwrap_image({"bytes": None, "path": "a.png"})
    ('a.png', 'a.png')
    """
    while isinstance(value, Mapping):
        value = next((value[key] for key in KEYS if value.get(key) is not None), None)
    return value


def images_of(where: str, row: Mapping[str, Any], prompt: str) -> list[Any] | None:
    """List the images in the fields of a row; None if it has no such field. Raises DataError if both fields hold images.

    >>> images_of("row 0", {"prompt": "What is this?", "image": "a.png"}, "prompt")
    ['a.png']
    """
    given = [row[name] for name in FIELDS if name != prompt and row.get(name) is not None]
    lists = [value.tolist() if dimensions(value) == 1 else value if isinstance(value, list | tuple) else [value] for value in given]
    if all(lists) and len(lists) > 1:
        raise DataError(f"{where} has both 'images' and 'image'; a row has its images in one of them: rename or remove the other field")
    return [image for images in lists for image in images] if lists else None


def place_images(where: str, messages: list[dict[str, Any]], images: list[Any], given: list[Any] | None) -> None:
    """Put the images of a row's fields into the places of its messages that lack theirs, which are None in `images`.

    Messages without parts that are images get them, in place: at each `<image>`, else before the text of the user's first message.

    >>> messages, images = [{"role": "user", "content": "<image>What is this?"}], []
    >>> place_images("row 0", messages, images, ["a.png"])
    >>> messages[0]["content"], images
    ([{'type': 'image'}, {'type': 'text', 'text': 'What is this?'}], ['a.png'])

    Raises DataError, which begins with `where`, if there are more places than images, or fewer.
    """
    if not images and given is not None:
        images += [None] * _add_parts(messages, len(given))
    places, left = [place for place, image in enumerate(images) if image is None], given or []
    if len(places) != len(left):
        raise DataError(
            f"{where} has {len(places)} places for images in its messages, and {len(left)} images in its fields 'images' and 'image'; "
            "write one '<image>', or one part {'type': 'image'}, per image"
        )
    for place, image in zip(places, left, strict=True):
        images[place] = image


def _add_parts(messages: list[dict[str, Any]], count: int) -> int:
    """Write parts for `count` images into messages of text; return how many there are."""
    marked = [message for message in messages if MARK in (message.get("content") or "")]
    for message in marked:
        message["content"] = parts_of(message["content"])
    asked = next((message for message in messages if message["role"] == "user"), None)
    if marked or asked is None:
        return sum(part["type"] == "image" for message in marked for part in message["content"])
    if count:
        asked["content"] = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": asked["content"]}]
    return count


def parts_of(text: str) -> list[dict[str, str]]:
    """Split a text at its marks `<image>` into the parts of a message.

    >>> parts_of("<image>What is this?")
    [{'type': 'image'}, {'type': 'text', 'text': 'What is this?'}]
    """
    parts = [part for piece in text.split(MARK) for part in ({"type": "image"}, {"type": "text", "text": piece})]
    return [part for part in parts[1:] if part.get("text") != ""]


def read_parts(content: Any) -> tuple[str, list[Any]] | None:
    """Write an answer with images as text with a mark `<image>` in the place of each, and list the images; None for one without.

    An image is one of PIL, or among the parts of a list, as in the messages of OpenAI; one without data is None. A text stays one, whatever
    it begins with: a program of the model may have written it.

    >>> read_parts([{"type": "text", "text": "A plot:"}, {"type": "image", "image": "a.png"}])
    ('A plot:<image>', ['a.png'])
    """
    if type(content).__module__.startswith("PIL."):
        return MARK, [content]
    parts = content if isinstance(content, list | tuple) else ()
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if not set(kinds) & set(PARTS) or not set(kinds) <= {*PARTS, "text"}:
        return None
    text = "".join(str(part.get("text", "")) if kind == "text" else MARK for kind, part in zip(kinds, parts, strict=True))
    return text, [unwrap_image(part) for kind, part in zip(kinds, parts, strict=True) if kind != "text"]


def check_image(where: str, image: Any, folder: Path) -> None:
    """Check an image before it is used, of the usual formats without decoding it. `folder` is where relative paths begin.

    Raises DataError, which begins with `where`, for an image that is missing, cut off, animated or too large, and for anything else.
    """
    _read(where, image, folder)


def data_url(where: str, image: Any, folder: Path) -> str:
    """Read an image as a data URL of its file's own bytes; an image of PIL and an array become PNG. Raises DataError as `check_image`.

    >>> from PIL import Image
    >>> data_url("row 0", Image.new("RGB", (2, 2)), Path())[:30]
    'data:image/png;base64,iVBORw0K'
    """
    content, opened = _read(where, image, folder)
    kind = "image/png"
    if isinstance(content, bytes):
        kind = opened.get_format_mimetype() or f"image/{opened.format.lower()}"
    else:
        written = io.BytesIO()
        (opened if opened.mode in MODES else opened.convert("RGB")).save(written, "PNG", compress_level=1)
        content = written.getvalue()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _read(where: str, image: Any, folder: Path) -> tuple[Any, Any]:
    """Read and check an image: its bytes, or an image of PIL, and what Pillow opened of it."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(f"{where}: images are read with Pillow, which is not installed: pip install pillow") from None
    image = unwrap_image(image)
    content = image if dimensions(image) or isinstance(image, Image.Image) else _content(where, image, folder)
    if isinstance(image, str | Path):
        where = f"{where}, {show_value(str(image))},"
    try:
        content = Image.fromarray(content) if dimensions(content) else content
        opened: Any = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
        large, frames = opened.width * opened.height > MOST_PIXELS, _frames(opened)
        if isinstance(content, bytes) and not large:
            opened.verify() if opened.format in VERIFIED else opened.load()
            if opened.format == "JPEG" and content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda"):  # its end, and its last scan
                raise ValueError("its end is missing")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        large, frames = True, 1
    except Exception as error:
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({type(error).__name__}: {error!s:.120})"
        raise DataError(f"{where} is broken, cut off or not an image{why}; replace the image, or leave the row out") from error
    if large:
        raise DataError(f"{where} has more than {MOST_PIXELS // 10**6} million pixels, the most that is read; scale it down")
    if frames > 1:
        raise DataError(f"{where} has {frames} frames; an image of a prompt has one: save the frame that you want")
    return content, opened


def _frames(value: Any) -> int:
    """Count the frames of an image of PIL; formats without frames do not know."""
    return int(value.n_frames) if hasattr(value, "n_frames") else 1


def _content(where: str, image: Any, folder: Path) -> Any:
    """Read the bytes of an image that is a path, bytes or a data URL."""
    try:
        if isinstance(image, str) and image.startswith("data:"):
            head, _, data = image.partition(",")
            return base64.b64decode(data if head.endswith(";base64") else "-", validate=True)
        if isinstance(image, str) and image.startswith(("http://", "https://")):
            raise DataError(f"{where} is {show_value(image)}; nothing is downloaded while training: download it, and write its path")
        if isinstance(image, str | Path):
            return (folder / Path(str(image).removeprefix("file://")).expanduser()).read_bytes()
    except OSError as error:
        raise DataError(
            f"{where} is {show_value(str(image))}, which cannot be read ({error}); a relative path begins in the folder of its data file, "
            "or in the working directory: correct the path"
        ) from None
    except ValueError as error:
        raise DataError(
            f"{where} is {show_value(image)} ({error}); a data URL is 'data:image/png;base64,' and the bytes in base64"
        ) from None
    if isinstance(image, bytes):
        return image
    raise DataError(
        f"{where} is {show_value(image)}; an image is a path, bytes, a data URL, an image of PIL or an array of bytes [height, width, 3]: "
        "convert it, or rename its field"
    )


@lru_cache(maxsize=256)
def thumbnails(urls: str) -> str:
    """Make the images of a row, a JSON list of data URLs, small enough to record one for each response: at most 192 pixels a side.

    >>> thumbnails("[]")
    '[]'
    """
    return json.dumps([_thumbnail(url) for url in json.loads(urls)])


def _thumbnail(url: str) -> str:
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    if max(image.size) <= THUMBNAIL:
        return url
    small, file = image.convert("RGB"), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
