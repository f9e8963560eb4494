"""An engine of vLLM with routes=True tells the experts that its routers chose, those of cached prefixes included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_programs
from support.paths import PROGRAMS
from support.router_replay import PROMPTS, copy_with_weights, load_model, routes_of
from support.tiny import tiny_moe

pytestmark = [pytest.mark.stage("jobs"), pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out") / "found.pt"
    done = forked_programs.run(str(PROGRAMS / "routes_process.py"), str(model), str(out), cwd=out.parent, timeout_s=550)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = torch.load(out)
    return loaded


@pytest.mark.parametrize("part", ["first", "again"])
def test_routes_are_those_of_a_forward_of_transformers(part: str, model: Path, told: dict[str, Any]) -> None:
    own = load_model(model)
    for prompt, (tokens, routes) in zip(PROMPTS, told["found"][part], strict=True):
        assert routes.shape == (len(prompt) + len(tokens), 2, 2)
        assert (routes[-1] == -1).all()
        expected = routes_of(own, [*prompt, *tokens])[:-1]
        assert torch.equal(routes[:-1].long().sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_tokens_keep_the_routes_of_the_weights_that_sampled_them(running: str, model: Path, told: dict[str, Any]) -> None:
    own = load_model(model)
    for name in ("long", "alike"):
        tokens, routes, versions = told["found"][f"{running} {name}"][0]
        old = versions.count(versions[0])
        assert 0 < old < len(tokens)
        read = len(PROMPTS[1]) + old - 1
        expected = routes_of(own, [*PROMPTS[1], *tokens]).sort(-1).values
        assert torch.equal(routes[:read].long().sort(-1).values, expected[:read])
        assert not torch.equal(routes[read:-1].long().sort(-1).values, expected[read:-1])
    folder = model.with_name(f"others {running}")
    tokens, routes, _ = told["found"][f"{running} new"][0]
    expected = routes_of(load_model(copy_with_weights(model, folder, told["others"])), [*PROMPTS[1], *tokens])[:-1]
    assert torch.equal(routes[:-1].long().sort(-1).values, expected.sort(-1).values)
