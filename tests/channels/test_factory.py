"""The table of transports: what a plan takes by default, and that a wrong name is an error."""

import importlib

import pytest
from support.fakes import vector_loop

import rlgraph as rg
from rlgraph.channels import TRANSPORTS, Site, open_reader, open_writer
from rlgraph.channels.api import first_choice
from rlgraph.errors import ChannelError, PlanError


def test_a_plan_chooses_the_transport_by_reach_and_memory():
    wanted = [("process", "host"), ("host", "host"), ("host", "gpu"), ("hosts", "host"), ("hosts", "gpu")]
    assert [first_choice(reach, memory) for reach, memory in wanted] == ["local", "shm", "peer", "tcp", "nccl"]


@pytest.mark.parametrize("make", [open_writer, open_reader])
def test_an_unknown_transport_is_an_error_that_lists_the_names(make):
    with pytest.raises(ChannelError, match=r"transport 'pigeon'.*'local', 'shm', 'peer', 'tcp', 'nccl'"):
        make("pigeon", Site("edge", 1, 1, "/tmp/edge"))


def test_a_plan_of_an_unknown_transport_is_not_read():
    text = rg.compile(vector_loop(depth=1), rg.Cluster(cpus=2)).to_json()
    assert '"transport": "shm"' in text
    with pytest.raises(PlanError, match="transport 'pigeon' means nothing here"):
        rg.Plan.from_json(text.replace('"transport": "shm"', '"transport": "pigeon"', 1))


def test_a_local_channel_has_no_more_readers_than_were_agreed_on():
    site = Site("edge", 1, 1, "here")
    open_writer("local", site)
    open_reader("local", site)
    with pytest.raises(ChannelError, match="channel 'edge' has 1 readers, and all of them have been made"):
        open_reader("local", site)


def test_every_transport_names_a_module_with_both_ends():
    for transport in TRANSPORTS.values():
        module = importlib.import_module(transport.module)
        assert callable(module.open_writer), transport.name
        assert callable(module.open_reader), transport.name
