"""What becomes of each setting of verl, as data: settings.yaml."""

from collections.abc import Sequence
from pathlib import Path

from rlgraph_cli.from_verl.script import Call
from rlgraph_cli.translate.settings import Outcome, Tables, Values

TABLES = Tables.read("verl 0.9.1", Path(__file__).with_name("settings.yaml"))


def values_of(call: Call, outcomes: Sequence[Outcome]) -> Values:
    """Take the values of a call's settings, and the trainer that its configuration's name says."""
    return Values.of(TABLES, call.source, outcomes, megatron="megatron" in call.config)
