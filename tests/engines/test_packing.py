"""Which rows are computed together."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import batch_of

from rlgraph.batching.packing import micro_batches, pack, pack_flat, plan_micro_batches, response_lengths
from rlgraph.engines.forward import packed_attention

LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8).map(
    lambda pairs: [n for p in pairs for n in p]
)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 100), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_trained_token_is_predicted_once_whatever_the_split(
    lengths: list[int], world: int, limit: int, holes: bool, flat: bool
) -> None:
    batch = batch_of(lengths, holes=holes)
    seen = torch.zeros_like(batch["responses"])
    plans = plan_micro_batches(batch, world, limit, flat=flat)
    for sequences in (sequences for plan in plans for sequences in plan):
        part = (pack_flat if flat else pack)(batch, sequences)
        rows = part.rows[part.row]
        seen[rows, part.column] += 1
        assert torch.equal(part.targets, batch["responses"][rows, part.column])
    assert torch.equal(seen.bool(), batch["response_mask"])
    assert seen.max() == 1
    assert len({len(plan) for plan in plans}) == 1, "collectives of the ranks must match"


@given(LENGTHS, st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_a_micro_batch_of_several_sequences_is_within_the_limit(lengths: list[int], limit: int) -> None:
    for sequences in plan_micro_batches(batch_of(lengths), 1, limit)[0]:
        assert len(sequences) == 1 or len(sequences) * max(s.tokens for s in sequences) <= limit


def test_responses_of_one_prompt_share_it_and_do_not_see_each_other() -> None:
    batch = batch_of([3, 3])
    [[[sequence]]] = plan_micro_batches(batch, 1, 1000)
    part = pack(batch, [sequence])
    prompt = int(batch["prompt_mask"][0].sum())
    assert part.tokens.shape == (1, prompt + 2 + 2)
    assert part.mask is not None
    first, second = slice(prompt, prompt + 2), slice(prompt + 2, prompt + 4)
    assert not part.mask[0, 0, second, first].any()
    assert part.mask[0, 0, second, :prompt].all()
    assert part.positions[0].tolist() == [*range(prompt + 2), prompt, prompt + 1]


def test_long_responses_do_not_share_their_prompt() -> None:
    batch = batch_of([60, 60])
    assert [len(sequence.rows) for part in plan_micro_batches(batch, 1, 1000)[0] for sequence in part] == [1, 1]


def test_ranks_get_as_many_tokens_as_each_other() -> None:
    plans = plan_micro_batches(batch_of([40, 40, 30, 30, 20, 20, 10, 10], group=1), 2, 1000)
    tokens = [sum(sequence.tokens for part in plan for sequence in part) for plan in plans]
    assert abs(tokens[0] - tokens[1]) <= 10


def test_tool_tokens_count_as_context_up_to_the_last_token_of_the_policy() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    assert response_lengths(mask).tolist() == [3, 0, 5]


@given(LENGTHS, st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_packed_flat_each_row_has_its_own_prompt_and_no_token_is_padding(lengths: list[int], limit: int) -> None:
    batch = batch_of(lengths)
    for sequences in plan_micro_batches(batch, 1, limit, flat=True)[0]:
        part = pack_flat(batch, sequences)
        assert part.starts is not None
        assert part.starts.diff().tolist() == [s.tokens for s in sequences]
        assert part.tokens.shape == (1, sum(s.tokens for s in sequences))
        assert part.longest == max(s.tokens for s in sequences)
        assert len(sequences) == 1 or part.tokens.shape[1] <= limit
        for start, end in zip(part.starts.tolist(), part.starts.tolist()[1:], strict=False):
            assert part.positions[0, start:end].tolist() == list(range(end - start))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 120), st.booleans())
def test_sequences_are_dealt_to_the_least_loaded_rank_and_cut_at_the_limit(sizes: list[int], ranks: int, limit: int, padded: bool) -> None:
    sizes = sorted(sizes, reverse=True)
    own: list[list[int]] = [[] for _ in range(ranks)]
    for size in sizes:
        min(own, key=sum).append(size)
    expected = []
    for mine in own:
        passes: list[list[int]] = []
        for size in mine:
            if passes and (passes[-1][0] * (len(passes[-1]) + 1) if padded else sum(passes[-1]) + size) <= limit:
                passes[-1].append(size)
            else:
                passes.append([size])
        expected.append(passes)
    found = micro_batches(np.array([sizes, sizes]), ranks, limit, padded=padded)
    for rank, part in zip(*(x.tolist() for x in found), strict=True):
        cut: list[list[list[int]]] = [[[] for _ in plan] for plan in expected]
        for size, r, p in zip(sizes, rank, part, strict=True):
            cut[r][p].append(size)
        assert cut == expected


def test_whether_the_kernel_takes_a_head_can_be_asked_in_a_compiled_layer() -> None:
    def asked(query: torch.Tensor) -> torch.Tensor:
        return query + 1 if packed_attention.kernel_takes(query.shape[-1]) else query - 1

    compiled = torch.compile(asked, dynamic=True, fullgraph=True, backend="eager")
    assert [compiled(torch.zeros(2, size)).max().item() for size in (64, 12, 256, 264)] == [1, -1, 1, -1]
