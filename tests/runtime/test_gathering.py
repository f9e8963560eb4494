"""Hosts that do not share the folder of checkpoints send their shards to the driver's host; a checkpoint is whole, or it is not there.

What a case does is in `gathering_program.py`; each runs on three hosts with file systems of their own.
"""

import hashlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support import namespaces
from support.paths import PROGRAMS

from rlgraph.channels.host.connection import Connection, ProtocolError
from rlgraph.errors import CheckpointError
from rlgraph.runtime.checkpoint import gathering
from rlgraph.runtime.checkpoint.gathering import DriverFolder, Gatherer
from rlgraph.runtime.messages import Written

PROGRAM = PROGRAMS / "gathering_program.py"
# A case of many jobs comes before one of few, in each of two rows.
CASES = RESUMED, DRIVER, SHARED, HOST, FULL = "resumed", "driver killed", "shared", "host killed while it sends", "driver's disk full"
KEY, ID = b"key", "ab"
T = TypeVar("T")


def on_hosts(test: T) -> T:
    for mark in (pytest.mark.stage("hosts"), pytest.mark.namespaces, pytest.mark.timeout(600)):  # the first test waits for all cases
        test = mark(test)
    return test


class Folders:
    """A driver's folder that is listened for, and one of another host."""

    def __init__(self, tmp: Path, *, encrypt: bool = False) -> None:
        self.driver, self.other, self.encrypt = tmp / "driver", tmp / "other", encrypt
        (self.driver / "step-00000002").mkdir(parents=True)
        self.other.mkdir()
        self.gatherer = Gatherer("127.0.0.1", KEY, self.driver, ID, self.driver / "step-00000002", encrypt=encrypt)

    def worker(self) -> DriverFolder:
        return DriverFolder(self.gatherer.address, KEY, 10.0, encrypt=self.encrypt)

    def written(self, path: str, data: bytes) -> Written:
        (self.other / path).parent.mkdir(parents=True, exist_ok=True)
        (self.other / path).write_bytes(data)
        return Written(path, len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.openssl)], ids=["plain", "encrypted"])
def folders(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Folders]:
    made = Folders(tmp_path, encrypt=request.param)
    yield made
    made.gatherer.close()


def test_files_arrive_under_the_hidden_name_of_their_checkpoint_and_come_back_for_a_resume(folders: Folders) -> None:
    data = bytes(range(256)) * 20_000  # several chunks
    files = [folders.written("policy/__1_0.distcp", data), folders.written("policy[1].pt", b""), folders.written("x.pt", b"x")]
    (folders.driver / "step-00000002" / "manifest.json").write_bytes(data)
    with folders.worker() as worker:
        worker.send(4, folders.other, files)
        worker.fetch("manifest.json", folders.other / "resumed")
    arrived = folders.driver / f".part-{ID}-00000004"
    assert {file.path: (arrived / file.path).read_bytes() for file in files} == {
        file.path: (folders.other / file.path).read_bytes() for file in files
    }
    assert [path.name for path in (folders.other / "resumed").iterdir()] == ["manifest.json"]
    assert (folders.other / "resumed" / "manifest.json").read_bytes() == data


def test_bytes_that_are_not_those_that_were_saved_are_refused(folders: Folders) -> None:
    file = folders.written("x.pt", b"saved")
    (folders.other / "x.pt").write_bytes(b"other")
    (folders.driver / "step-00000002" / "x.pt").write_bytes(b"other")
    with folders.worker() as worker:
        with pytest.raises(CheckpointError, match=r"could not receive or send 'x.pt': other bytes arrived than were sent"):
            worker.send(4, folders.other, [file])
        with pytest.raises(CheckpointError, match=r"'x.pt' of a checkpoint could not be copied .*: other bytes arrived than were saved"):
            worker.fetch("x.pt", folders.other / "resumed", file.sha256)
    assert not (folders.other / "resumed" / "x.pt").exists()


def test_a_file_that_is_not_there_is_named(folders: Folders) -> None:
    with folders.worker() as worker, pytest.raises(CheckpointError, match=r"'gone.pt': .*No such file"):
        worker.fetch("gone.pt", folders.other)


@pytest.mark.parametrize("path", ["../x.pt", "/tmp/x.pt", "policy/../../../x.pt", ""])
@pytest.mark.parametrize("what", ["offer", "wish"])
def test_no_path_leads_out_of_a_checkpoint(folders: Folders, path: str, what: str) -> None:
    message = gathering.Offer(4, Written(path, 0, "")) if what == "offer" else gathering.Wish(path)
    with folders.worker() as worker:
        gathering._send(worker._connection, message)
        with pytest.raises((EOFError, OSError)):  # the driver ends the connection
            gathering._receive(worker._connection)
    with folders.worker() as worker, pytest.raises(ProtocolError, match="leads out of a checkpoint"):
        worker.fetch(path, folders.other)
    assert [path.name for path in folders.driver.iterdir()] == ["step-00000002"]


def test_who_does_not_know_the_jobs_key_gets_nothing(folders: Folders) -> None:
    host, port = folders.gatherer.address.split(":")
    with pytest.raises(AuthenticationError, match="does not know the key"):
        Connection(socket.create_connection((host, int(port))), b"guess", 10.0, server=False, encrypt=folders.encrypt)
    with folders.worker() as worker:  # and the others are served
        worker.send(2, folders.other, [folders.written("x.pt", b"x")])


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Mapping[str, Any]]:
    """Run all cases, two at a time, and return what came of each."""
    command = namespaces.isolate_command([sys.executable, str(PROGRAM), "2", *CASES])
    run = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    found = {outcome["case"]: outcome for outcome in map(json.loads, filter(lambda line: line.startswith("{"), run.stdout.splitlines()))}
    if missing := {*CASES} - found.keys():
        pytest.fail(f"no outcome of {sorted(missing)}\n{run.stderr}")
    return found


def checked(outcomes: Mapping[str, Mapping[str, Any]], case: str) -> Mapping[str, Any]:
    """Check that a run with gathered checkpoints is, to the bit, the one whose hosts share the folder, and left nothing unfinished."""
    outcome, shared = outcomes[case], outcomes[SHARED]
    assert (outcome["error"], shared["error"], shared["told"]) == ("", "", []), (outcome, shared)
    assert outcome["steps"] == shared["steps"][-len(outcome["steps"]) :]
    for what in ("weights", "left"):
        assert outcome[what] == shared[what], outcome
    assert outcome["left"] == ["lock", "step-00000004", "step-00000006"]
    return outcome


@on_hosts
def test_a_run_resumes_with_other_numbers_of_hosts_that_share_no_folder(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    outcome = checked(outcomes, RESUMED)
    assert (outcome["ranks"], [index for index, *_ in outcome["steps"]]) == (2, [0, 1, 2, 3, 4, 5])
    hosts = [re.findall(r"host \d \(10\.99\.0\.\d\)", *notices) for notices in outcome["told"]]
    assert hosts == [["host 1 (10.99.0.2)", "host 2 (10.99.0.3)"], ["host 1 (10.99.0.2)"], ["host 1 (10.99.0.2)", "host 2 (10.99.0.3)"]]


@on_hosts
def test_shards_are_taken_at_the_plans_addresses_alone(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    for ports in outcomes[RESUMED]["ports"]:
        assert ports == {host: [namespaces.address(int(host))] for host in ports}


@on_hosts
def test_an_export_to_a_folder_that_not_all_hosts_see_says_what_to_do(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    assert re.search(r"host 'host[23]' does not see '.*/\.exported-.*'; .*`rg\.runs\.export`", outcomes[RESUMED]["refused"])


@on_hosts
@pytest.mark.parametrize("case", [DRIVER, HOST])
def test_a_kill_while_a_shard_is_sent_leaves_the_last_checkpoint_whole(outcomes: Mapping[str, Mapping[str, Any]], case: str) -> None:
    outcome = checked(outcomes, case)
    assert 0 < outcome["half"] < outcome["full"], outcome
    assert outcome["whole"] == [2]
    assert outcome.get("begin", 2) == 2
    assert outcome.get("restarts", 1) == 1


@on_hosts
def test_a_full_disk_of_the_drivers_host_is_named_and_leaves_the_last_checkpoint_whole(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    outcome = outcomes[FULL]
    assert outcome["kind"] == "CheckpointError"
    worker = r"'policy\[1\]' on host 2 \(10\.99\.0\.3\)"
    full = r"CheckpointError: the driver's host could not .*No space left on device.*\(\d+ MiB are free"
    assert re.search(f"{worker}: {full}", outcome["error"]), outcome["error"]
    assert outcome["error"].endswith(f"the newest checkpoint is of step {outcome['whole'][-1]}")
    assert (outcome["newest"], outcome["left"]) == (f"step-{outcome['whole'][-1]:08d}", ["lock"])
