"""Ring attention: who sees which keys at which hop, how even that is, and that a visit's kernel and its plain form give the same."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.flat_kernel import flash4_on_cpu, flash_on_cpu

from rlgraph.batching.packing import ring_pieces
from rlgraph.engines.forward import ring
from rlgraph.engines.forward.packed_attention import attend
from rlgraph.engines.forward.ring import RingSchedule, schedule
from rlgraph.errors import DataError

ROWS = [[0, 48], [0, 24, 48], [0, 1, 2, 17, 31, 48], [0, 5, 9, 13, 40, 47, 48]]
BEHIND = [(range(7), range(12, 29)), (range(7, 12), range(29, 40))]  # prompts of a row, and their responses
SHARING = [0, 7, 12, 20, 29, 35, 40, 48]


def seen(made: RingSchedule, length: int) -> torch.Tensor:
    """How often each query of the row sees each key."""
    ranks, found = len(made.visits), torch.zeros(length, length, dtype=torch.long)
    places = [[place for piece in ring_pieces(length, rank, ranks) for place in piece] for rank in range(ranks)]
    for rank, hops in enumerate(made.visits):
        for hop, visits in enumerate(hops):
            keys = places[(rank - hop) % ranks]
            for visit in visits:
                for (start, end), (first, last) in zip(pairwise(visit.queries), pairwise(visit.keys), strict=True):
                    for query in range(start, end):
                        for key in range(first, last - (end - 1 - query) if visit.causal else last):
                            found[places[rank][query], keys[key]] += 1
    return found


def expected(starts: Sequence[int], prompts: Sequence[tuple[range, range]] = ()) -> torch.Tensor:
    found = torch.zeros(starts[-1], starts[-1], dtype=torch.long)
    for start, end in pairwise(starts):
        found[start:end, start:end] = torch.ones(end - start, end - start).tril()
    for prompt, responses in prompts:
        found[responses.start : responses.stop, prompt.start : prompt.stop] = 1
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("starts", ROWS)
def test_each_query_sees_each_key_before_it_in_its_sequence_once(starts: list[int], ranks: int) -> None:
    made = schedule(starts, ranks)
    assert torch.equal(seen(made, 48), expected(starts))
    assert sum(map(sum, made.pairs())) == expected(starts).sum()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_responses_see_the_prompt_that_they_share(ranks: int) -> None:
    assert torch.equal(seen(schedule(SHARING, ranks, BEHIND), 48), expected(SHARING, BEHIND))


def test_all_ranks_have_as_much_to_do_at_each_hop_of_a_long_sequence() -> None:
    size = 16384
    for ranks in (2, 4, 8):
        work = schedule([0, size], ranks).pairs()
        assert all(rank == work[0] for rank in work)
        ideal = size * (size + 1) / 2 / ranks
        assert sum(work[0]) == ideal
    halves = schedule([0, size // 2, size], 2).pairs()
    assert sum(halves[0]) == sum(halves[1])


@pytest.mark.parametrize("package", [flash_on_cpu, flash4_on_cpu])
def test_a_visit_by_the_kernel_is_that_in_plain_torch(package: object, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(ring, "SCORES_AT_ONCE", 4 * 16 * 3)  # three queries at a time
    for visit in (visit for hops in schedule(SHARING, 2, BEHIND).visits for visits in hops for visit in visits):
        placed = ring._Placed.of(visit, torch.device("cpu"))
        queries, keys = visit.queries[-1] - visit.queries[0], visit.keys[-1] - visit.keys[0]
        q, grad = (torch.randn(queries, 4, 8, generator=draw) for _ in range(2))
        k, v = (torch.randn(keys, 2, 8, generator=draw) for _ in range(2))
        plain = ring._forward(q, k, v, placed, 0.3)
        more = torch.logaddexp(plain[1], torch.randn(4, queries, generator=draw))  # sums over other keys too
        given = q, k, v, plain[0] * 0.5, more
        of_plain = ring._backward(grad, given, placed, 0.3)
        with package(), monkeypatch.context() as patch:  # type: ignore[operator]
            patch.setattr(ring, "_by_kernel", lambda q: True)
            kernel = ring._forward(q, k, v, placed, 0.3)
            of_kernel = ring._backward(grad, (*given, *kernel[2:]), placed, 0.3)
        for one, other in zip((*plain, *of_plain), (*kernel[:2], *of_kernel), strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"sliding_window": 4}, "a sliding window"), ({"softcap": 5.0}, "a soft cap"), ({"s_aux": torch.zeros(1)}, "attention sinks")],
)
def test_what_a_ring_does_not_know_is_refused(setting: dict[str, object], said: str) -> None:
    given = {"context_group": object(), "context_ring": SimpleNamespace(heads=None), **setting}
    with pytest.raises(DataError, match=f"Module has {said}, which ring attention does not support"):
        attend(torch.nn.Module(), *(torch.zeros(1, 1, 2, 8),) * 3, None, **given)  # type: ignore[arg-type]
