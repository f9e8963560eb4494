"""How many responses an engine is made for: as many as the graph gives it at once, and no more than it can take."""

import pytest
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.engines.vllm.arguments import most_sequences
from rlgraph.runtime.worker.spec import worker_specs


def graph(*, prompts: int = 6, group: int = 4, chunks: int = 1, continuous: bool = False) -> rg.Graph:
    generator = rg.Generator("m", pool=rg.Pool("rollout", gpus=2))
    policy = rg.Policy("m", pool=rg.Pool("train", gpus=1))
    return grpo_graph(generator, policy, name="sequences", count=prompts, group_size=group, chunks=chunks, continuous=continuous)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (graph(), 12),
        (graph(prompts=7), 16),  # 4 and 3 prompts: the larger share
        (graph(prompts=6, chunks=2), 16),  # of each part of 3 prompts, 2
        (graph(continuous=True), 24),
    ],
)
def test_an_engine_is_made_for_what_the_graph_gives_it_at_once(made: rg.Graph, expected: int) -> None:
    each = worker_specs(made, rg.compile(made, rg.Cluster(gpus=3)), "", b"", 1.0)
    assert {spec.sequences for spec in each if isinstance(spec.model, rg.Generator)} == {expected}
    assert {spec.sequences for spec in each if not isinstance(spec.model, rg.Generator)} == {0}


def test_no_engine_decodes_more_than_fits_at_once() -> None:
    assert [most_sequences(on_cpu, 5000) for on_cpu in (True, False)] == [256, 1024]
    assert [most_sequences(on_cpu) for on_cpu in (True, False)] == [256, 1024]
    assert most_sequences(False, 12) == 12
