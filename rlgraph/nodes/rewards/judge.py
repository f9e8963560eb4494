"""A judge: a language model behind an OpenAI-compatible server that scores responses."""

import asyncio
import importlib.util
import inspect
import json
import math
import os
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rlgraph import settings
from rlgraph.errors import NOT_JSON, DataError, GraphError, show_value
from rlgraph.nodes.rewards.calls import CONCURRENCY, Busy, Retry, Scorer
from rlgraph.settings import AtLeastZero, Count, Finite, Name, Natural, Range, Seconds, check_arguments

if TYPE_CHECKING:
    import httpx2

PROMPT = """Grade the response to the prompt.

Prompt:
{prompt}

Response:
{response}

Reason briefly. End with a line "Score: N", with N from 0 for a useless response to 1 for a perfect one."""
KEY = "OPENAI_API_KEY"
MOST_BYTES = 4 << 20  # of an answer of the server
EXCERPT = 200  # characters of an answer in an error
REFUSED = (301, 302, 303, 307, 308, 401, 403, 404, 405)  # a further call cannot help: address, key or model are wrong
SCORE = re.compile(r"score\W{0,6}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
Parse: TypeAlias = Annotated[Callable[..., Any], Range(rule="a function from the judge's text to a number")]


def score_in(text: str) -> float:
    """Read the last `Score: N` of a judge's text.

    >>> score_in("The sum is right, the reasoning is not. Score: 0.5")
    0.5

    Raises ValueError for a text without a score, or with a number beyond the range of floats.
    """
    found = SCORE.findall(text)
    if not found:
        raise ValueError(f"the judge wrote no 'Score: N' but {text[-EXCERPT:]!r}")
    score = float(found[-1])
    if not math.isfinite(score):
        raise ValueError(f"the judge wrote a score of {len(found[-1])} characters, {found[-1][:EXCERPT]}…")
    return score


@dataclass(frozen=True)
class Judge(Scorer):
    """Asks the server about each response. Its parameters are the fields of `prompt`. It knows only the name of the key's variable."""

    url: Name
    model: Name
    prompt: Name
    parse: Parse
    key: str
    max_tokens: Count
    temperature: AtLeastZero
    limit_s: Seconds
    body: Mapping[str, Any]
    concurrency: Count
    retries: Retry
    fields: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        settings.check(self)
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GraphError(
                f"judge(url={show_value(self.url)}): url is the address of an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise GraphError("judge(url=…): the address holds a user, a password or a query; put the key into the environment variable")
        # While it is made: `inspect.signature` reads the fields of the data from it, as from a function.
        object.__setattr__(self, "fields", _fields(self.prompt))
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.fields]
        object.__setattr__(self, "__signature__", inspect.Signature(parameters))

    @property
    def __name__(self) -> str:
        return f"judge of {self.model}"

    def check(self) -> None:
        """Check that the variable of the key is set, if one was named. Raises DataError."""
        if self.key != KEY and not os.environ.get(self.key):
            raise DataError(f"judge(key='{self.key}'): the environment variable {self.key} is not set; set it to the key of the server")

    async def __call__(self, **columns: object) -> Any:
        """Ask once. Raises Busy or ValueError if another call may help, and DataError if not."""
        key = os.environ.get(self.key, "")
        message = {"role": "user", "content": self.prompt.format(**columns)}
        asked = {"model": self.model, "messages": [message], "max_tokens": self.max_tokens, "temperature": self.temperature, **self.body}
        import httpx2

        try:
            async with asyncio.timeout(self.limit_s):
                status, headers, text = await self._post(json.dumps(asked), key)
        except TimeoutError:
            raise Busy(f"the judge has not answered within {self.limit_s:g} s") from None
        except httpx2.HTTPError as error:
            raise Busy(f"the judge cannot be reached: {type(error).__name__}: {_without(key, str(error))}") from None
        said = _without(key, text)
        if status in REFUSED:
            raise DataError(
                f"the judge at {self.url} answered with status {status}: {said[:EXCERPT]!r}; check url, model and the variable {self.key}"
            )
        if status != 200:
            raise Busy(f"the judge answered {status}: {said[:EXCERPT]!r}", _seconds(headers.get("retry-after", "")))
        return self.parse(_content(said))

    async def _post(self, body: str, key: str) -> tuple[int, Mapping[str, str], str]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        parts = bytearray()
        address = f"{self.url.rstrip('/')}/chat/completions"
        async with _client().stream("POST", address, content=body, headers=headers) as answer:
            async for part in answer.aiter_bytes():
                parts += part
                if len(parts) > MOST_BYTES:
                    raise ValueError(f"the judge's answer is longer than {MOST_BYTES} bytes")
            return answer.status_code, answer.headers, parts.decode(errors="replace")


@check_arguments()
def judge(
    url: Name,
    model: Name,
    *,
    prompt: Name = PROMPT,
    parse: Parse = score_in,
    key: Name = KEY,
    max_tokens: Count = 1024,
    temperature: AtLeastZero = 0.0,
    limit_s: Seconds = 120.0,
    body: Mapping[str, Any] | None = None,
    concurrency: Count = CONCURRENCY,
    retries: Natural | Retry = 3,
    default: Finite | None = None,
) -> Judge:
    """Make a scorer for `rlgraph.reward`: `model` on the OpenAI-compatible server at `url` grades each response.

    >>> import rlgraph as rg
    >>> grade = rg.scorers.judge("http://127.0.0.1:8000/v1", "judge", prompt="Is {response} equal to {answer}? Score: 0 or 1", default=0.0)
    >>> prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], count=1)
    >>> rg.reward(grade, prompts, rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts)).columns
    ('rewards',)

    * `prompt`: the question to the judge. Its fields have the names of a reward function's parameters: `{prompt}`, `{response}`,
      `{answer}`.
    * `parse`: reads the score in the judge's text. The default reads the last `Score: N`, and raises without one.
    * `key`: the environment variable that holds the server's key. Only the worker reads it, at each call. Leave it out for a server without
      a key.
    * `limit_s`: seconds for one answer. `body`: further entries of the request, e.g. {"top_p": 0.9}.
    * `concurrency` calls run at a time. `retries` repeats a call that fails (status 429 or 5xx, no score, or no answer in time), no sooner
      than the server's `Retry-After`; pass an `rg.options.Retry` for other pauses. `default` is the score if all fail.

    A wrong address, key or model (401, 403, 404) ends the run at once. Raises GraphError for a url or a prompt that cannot be used, and
    DataError if the package `httpx2` is missing.
    """
    if importlib.util.find_spec("httpx2") is None:
        raise DataError("judge: the package httpx2 is not installed: pip install 'rlgraph-dataflow[rewards]'")
    if isinstance(retries, Retry) and default is not None:
        raise GraphError(f"judge(retries={show_value(retries)}, default={default}): set the default in the Retry")
    retry = retries if isinstance(retries, Retry) else Retry(times=retries, default=default)
    return Judge(url, model, prompt, parse, key, max_tokens, temperature, limit_s, dict(body or {}), concurrency, retry)


def _fields(prompt: str) -> tuple[str, ...]:
    """List the fields of a prompt. Raises GraphError for a field that no column can fill."""
    try:
        found = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise GraphError(f"judge(prompt={show_value(prompt)}): {error}; write a brace of the text as two: {{{{ or }}}}") from None
    wrong = [name for name in found if not name.isidentifier()]
    if wrong or not any(name.startswith(("response", "completion", "solution")) for name in found):
        raise GraphError(
            f"judge(prompt={show_value(prompt)}): its fields are {found}; name columns, {{response}} among them, and write a brace "
            "of the text "
            "as two: {{ or }}"
        )
    return tuple(dict.fromkeys(found))


def _content(text: str) -> str:
    """Extract the judge's text from the server's answer. Raises ValueError for an answer of another form."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (*NOT_JSON, LookupError, TypeError):
        raise ValueError(f"the judge's answer is not a chat completion: {text[:EXCERPT]!r}") from None
    if not isinstance(content, str):
        raise ValueError(f"the judge's answer has no text: {text[:EXCERPT]!r}")
    return content


def _without(key: str, text: str) -> str:
    return text.replace(key, "…") if key else text


def _seconds(header: str) -> float:
    """Read a `Retry-After` of seconds; 0 for a date or anything else."""
    return min(float(header), 3600.0) if re.fullmatch(r"\d{1,6}(\.\d+)?", header) else 0.0


_clients: "WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient]" = WeakKeyDictionary()


def _client() -> "httpx2.AsyncClient":
    """The client of this event loop; it keeps its connections between calls."""
    import httpx2

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64))
    return _clients[loop]
