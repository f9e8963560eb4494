"""What works otherwise than asked is said once, wherever it is found, and by the job in the end."""

import logging

import pytest
from support import fakes, forked_workers

from rlgraph import errors, notices
from rlgraph.engines.vllm import mixed_cudagraph_patch
from rlgraph.errors import NodeError


def test_a_process_says_each_thing_once_and_gives_it_away_once() -> None:
    here = notices.Notices()
    here.carried = True
    here.say("slow")
    here.say("slow")
    assert here.take_new() == ["slow"]
    here.say("slow")
    here.say("slower")
    assert here.take_new() == ["slower"]


def test_where_nobody_fetches_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    here = notices.Notices()
    with caplog.at_level(logging.WARNING, "rlgraph.notices"):
        here.say("slow")
        here.say("slow")
    assert [record.getMessage() for record in caplog.records] == ["slow"]
    assert here.take_new() == []


def test_what_a_terminal_obeys_is_escaped_in_notices_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    here = notices.Notices()
    here.carried = True
    here.say("node '\x1b[2J\r'")
    assert here.take_new() == [r"node '\x1b[2J\x0d'"]
    error = NodeError("node 'a' failed: ValueError: \x1b]0;title\x07\n\tits line")
    errors.hook(NodeError, error, None)
    assert capsys.readouterr().err == f"rlgraph.errors.NodeError: {error}\n"
    assert str(error) == "node 'a' failed: ValueError: \\x1b]0;title\\x07\n\tits line"


def complain(step: int) -> None:
    notices.here.say("copies are made one by one")


def test_a_job_says_once_what_its_workers_said(capfd: pytest.CaptureFixture[str]) -> None:
    with forked_workers.job(fakes.vector_loop(1, begun=complain)) as job:
        list(job.steps(3))
        assert job.notices == ("copies are made one by one",)
        assert job.run().notices == job.notices
    assert capfd.readouterr().err.count("copies are made one by one") == 1


def test_a_vllm_that_steps_with_prompts_are_not_recorded_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "here", notices.Notices())
    notices.here.carried = True
    monkeypatch.setattr(mixed_cudagraph_patch, "version", lambda package: "0.99.1")
    mixed_cudagraph_patch.record_prompts()
    mixed_cudagraph_patch.record_prompts()
    [said] = notices.here.take_new()
    assert "not recorded as CUDA graphs" in said
    assert "written for vLLM 0.26 and this is 0.99.1" in said
