"""Which interface gloo and NCCL are told."""

import os

import pytest

from rlgraph.channels.host.connection import VARIABLES, interface_of, talk_at


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("127.3.2.1", "lo"), ("198.51.100.7", ""), ("::1", "")])
def test_an_address_leads_to_its_interface(address: str, name: str) -> None:
    assert interface_of(address) == name


def test_an_interface_that_the_user_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = VARIABLES
    monkeypatch.setenv(gloo, "ib0")
    monkeypatch.setenv(nccl, "")
    monkeypatch.delenv(nccl)
    talk_at("127.0.0.1")
    assert (os.environ[gloo], os.environ[nccl]) == ("ib0", "lo")
