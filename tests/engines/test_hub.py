"""Models by hub id: one download, at a revision; without a network one error at once."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from huggingface_hub import constants
from support.tiny import tiny_llama

import rlgraph as rg
from rlgraph.engines.transformers.spec import ENGINE

pytestmark = pytest.mark.stage("jobs")

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A hub with one model, `org/tiny`, and what it was asked for."""
    model, asked = tiny_llama(tmp_path), []

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlparse(self.path).path
            asked.append(path)
            files = {file.name: file.read_bytes() for file in model.iterdir()}
            resolved = f"/org/tiny/resolve/{REVISION}/"
            if path.startswith("/api/models/org/tiny/tree/"):
                self.answer(json.dumps([{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()]).encode())
            elif path.startswith("/api/models/org/tiny"):
                told = {"id": "org/tiny", "sha": REVISION, "siblings": [{"rfilename": name} for name in files]}
                self.answer(json.dumps(told).encode())
            elif path.startswith(resolved) and path.removeprefix(resolved) in files:
                data = files[path.removeprefix(resolved)]
                self.answer(data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": REVISION})
            else:
                self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

        def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


COMPILED = """
import sys
import rlgraph as rg
generator = rg.Generator(sys.argv[1], pool=rg.Pool("rollout"), engine="transformers", sampling=rg.Sampling(max_tokens=2), dtype="float32")
graph = rg.Graph("hub", generator.rollout(rg.prompts([{"prompt": "1"}], count=1)))
plan = rg.compile(graph, rg.Cluster(cpus=2))
print(plan.source.node("rollout").model.path)
from rlgraph.api import checked_source
from rlgraph.runtime.checkpoint.store import fingerprint
try:
    with plan.run_here() as job:
        list(job.steps(1))
    print(checked_source(plan).node("rollout").model.path)
    print(fingerprint(checked_source(plan), plan).get("revisions"))
except rg.errors.DataError as error:
    print("DataError", error)
assert generator.path == sys.argv[1]
"""


def compiled(cache: Path, endpoint: str, model: str = "org/tiny", **more: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    run = subprocess.run([sys.executable, "-c", COMPILED, model], env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_a_hub_id_is_downloaded_once_and_its_revision_is_in_path_and_fingerprint(served: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = served
    before, after, revisions = compiled(tmp_path / "cache", endpoint)
    assert before == "org/tiny"
    assert after.endswith(f"models--org--tiny/snapshots/{REVISION}")
    assert revisions == str({"generator": f"org/tiny@{REVISION}"})
    count = len(asked)
    assert compiled(tmp_path / "cache", endpoint, HF_HUB_OFFLINE="1") == [after, after, revisions]
    assert len(asked) == count


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("org/other", {}, "neither a folder here nor a model on"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids a download"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "could not provide it"),
    ],
)
def test_a_model_that_no_hub_gives_is_one_error_at_once(
    model: str, more: dict[str, str], said: str, served: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = served
    _, told, *_ = compiled(tmp_path / "cache", model=model, **{"endpoint": endpoint, **more})
    assert told.startswith(f"DataError model '{model}': ")
    assert said in told
    assert sum(path.startswith("/api/models/") for path in asked) == (model == "org/other")  # and not again and again


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_an_engine_loads_offline_and_a_reward_in_its_process_finds_what_the_user_set(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", given)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", given == "1")
    seen: list[tuple[str, str | None, bool]] = []

    def note(who: str) -> None:
        seen.append((who, os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE))

    def load(generator: Any, place: Any) -> Any:
        note("engine")
        return ENGINE.load(generator, place)

    def reward(responses: list[str]) -> list[float]:
        note("reward")
        return [float(number) for number, _ in enumerate(responses)]

    engine = rg.extend.EngineSpec(name="noted", load=load)
    generator = rg.Generator(str(tiny_llama(tmp_path)), pool=rg.Pool("rollout"), engine=engine, sampling=rg.Sampling(max_tokens=2))
    prompts = rg.prompts([{"prompt": "1"}], count=1)
    rollout = generator.rollout(prompts, group_size=2, refill=rg.options.Refill(reward=reward))
    with rg.compile(rg.Graph("own", rollout), rg.Cluster(cpus=2)).run_here() as job:
        assert len(list(job.steps(1))) == 1
    assert {*seen} == {("engine", "1", True), ("reward", given, given == "1")}
