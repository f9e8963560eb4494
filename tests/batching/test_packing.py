"""Which rows are computed together."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import batch_of

from rlgraph.batching.cutting import micro_batches
from rlgraph.batching.packing import pack, pack_flat, plan_micro_batches, response_lengths
from rlgraph.engines.forward import flash

LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8).map(
    lambda pairs: [n for p in pairs for n in p]
)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 100), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_trained_token_is_predicted_once_whatever_the_split(
    lengths: list[int], world: int, limit: int, holes: bool, flat: bool, shared: bool
) -> None:
    batch = batch_of(lengths, holes=holes)
    seen = torch.zeros_like(batch["responses"])
    plans = plan_micro_batches(batch, world, limit, flat=flat, shared=shared)
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


def test_a_response_of_many_prompts_has_its_own_prompt_and_shorter_ones_of_its_group_share_another() -> None:
    prompt = int(batch_of([1] * 5, group=5)["prompt_mask"][0].sum())
    batch = batch_of([20, 8 * prompt + 1, 20, 8 * prompt + 2, 20], group=5)  # the last token of a response is no input
    assert sorted(sequence.rows for sequence in plan_micro_batches(batch, 1, 1000, flat=True)[0][0]) == [(0, 1, 2), (3,), (4,)]


def test_ranks_get_as_many_tokens_as_each_other() -> None:
    plans = plan_micro_batches(batch_of([40, 40, 30, 30, 20, 20, 10, 10], group=1), 2, 1000)
    tokens = [sum(sequence.tokens for part in plan for sequence in part) for plan in plans]
    assert abs(tokens[0] - tokens[1]) <= 10


def test_tool_tokens_count_as_context_up_to_the_last_token_of_the_policy() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    assert response_lengths(mask).tolist() == [3, 0, 5]


@given(LENGTHS, st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_packed_flat_with_own_prompts_no_token_is_padding(lengths: list[int], limit: int) -> None:
    batch = batch_of(lengths)
    for sequences in plan_micro_batches(batch, 1, limit, flat=True, shared=False)[0]:
        part = pack_flat(batch, sequences)
        assert part.starts is not None
        assert part.prompts is not None
        assert part.prompts.tolist() == [s.prompt for s in sequences]
        assert part.shared is None
        assert part.starts.diff().tolist() == [s.tokens for s in sequences]
        assert part.tokens.shape == (1, sum(s.tokens for s in sequences))
        assert part.longest == max(s.tokens for s in sequences)
        assert len(sequences) == 1 or part.tokens.shape[1] <= limit
        for start, end in zip(part.starts.tolist(), part.starts.tolist()[1:], strict=False):
            assert part.positions[0, start:end].tolist() == list(range(end - start))


def whole(batch: dict[str, torch.Tensor], row: int, size: int) -> list[int]:
    prompt = batch["prompts"][row][batch["prompt_mask"][row]].tolist()
    return [*prompt, *batch["responses"][row, :size].tolist()]


@given(LENGTHS, st.sampled_from([2, 4]), st.integers(1, 200), st.integers(1, 3), st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_a_token_of_a_flat_pass_sees_its_own_sequence_and_nothing_else(
    lengths: list[int], group: int, limit: int, world: int, multiple: int
) -> None:
    """Whatever prompts are shared: by the places that a segment is told to see, the tokens before a token are those of its sequence."""
    lengths = (lengths * 4)[: len(lengths) // 2 * 4]
    batch = batch_of(lengths, group=group)
    for sequences in (sequences for plan in plan_micro_batches(batch, world, limit, flat=True) for sequences in plan):
        part = pack_flat(batch, sequences, multiple=multiple)
        assert part.starts is not None
        assert part.tokens.shape[1] % multiple == 0
        assert len(sequences) < 2 or sum(s.tokens for s in sequences) <= limit
        assert len(part.targets) <= part.tokens.shape[1], "memory is estimated by the tokens of a pass"
        keys, key_starts = torch.arange(part.tokens.shape[1]), part.starts
        if part.shared is not None:
            keys, key_starts = part.shared.keys, part.shared.key_starts
            prompts, responses = part.shared.tokens
            assert (int(part.shared.prompts[-1]), int(part.shared.responses[-1])) == (prompts, responses)
            assert part.shared.most_keys == int(key_starts.diff().max())
            assert part.shared.longest == (int(part.shared.prompts.diff().max()), max(2, int(part.shared.responses.diff().max())))
        assert part.longest == int(part.starts.diff().max())
        ends = part.starts[1:]
        for place, row, column in zip(part.predicts.tolist(), part.rows[part.row].tolist(), part.column.tolist(), strict=True):
            segment = int((ends <= place).sum())
            seen = keys[key_starts[segment] : key_starts[segment + 1]]
            seen = seen[: len(seen) - (int(ends[segment]) - 1 - place)]
            assert part.tokens[0, seen].tolist() == whole(batch, row, column)
            assert int(part.positions[0, place]) == len(seen) - 1


@given(LENGTHS, st.sampled_from([2, 4]))
@settings(max_examples=30, deadline=None)
def test_the_prompts_of_a_flat_pass_lie_before_the_responses_that_share_them(lengths: list[int], group: int) -> None:
    """The two calls of the kernel take these slices: the responses of group i, and the prompt of group i."""
    batch = batch_of((lengths * 4)[: len(lengths) // 2 * 4], group=group)
    [[sequences]] = plan_micro_batches(batch, 1, 1 << 20, flat=True)
    part = pack_flat(batch, sequences)
    if part.shared is None:
        assert not any(s.shares for s in sequences)
        return
    places = zip(part.shared.prompts, part.shared.prompts[1:], part.shared.responses, part.shared.responses[1:], strict=False)
    for sequence, (start, end, first, last) in zip((s for s in sequences if s.shares), places, strict=True):
        assert part.tokens[0, start:end].tolist() == whole(batch, sequence.rows[0], 0)
        own = [t for row, n in zip(sequence.rows, sequence.responses, strict=True) for t in batch["responses"][row, : n - 1].tolist()]
        assert part.tokens[0, part.shared.tokens[0] :][first:last].tolist() == own


def test_a_group_larger_than_a_flat_pass_has_a_copy_of_its_prompt_in_each() -> None:
    batch = batch_of([5] * 8, group=8)
    batch["prompt_mask"][:] = True
    plans = plan_micro_batches(batch, 1, 9 + 3 * 4, flat=True)[0]
    assert [[len(s.rows) for s in sequences] for sequences in plans] == [[3], [3], [2]]


def test_a_flat_pass_predicts_no_more_tokens_than_it_has() -> None:
    """Memory is estimated by the tokens of a pass, of which logits are a part."""
    batch = batch_of([1, 2] * 8, group=16)
    batch["prompt_mask"][:] = torch.arange(9) >= 6
    [[sequences]] = plan_micro_batches(batch, 1, 1000, flat=True)
    part = pack_flat(batch, sequences)
    assert len(part.targets) == 24
    assert part.tokens.shape[1] >= 24
    assert max(len(s.rows) for s in sequences) == 3


def test_the_kernel_is_never_told_of_single_queries() -> None:
    """It takes them for a decode step, and reorders heads."""
    [[sequences]] = plan_micro_batches(batch_of([2, 1, 1, 2]), 1, 1000, flat=True)
    part = pack_flat(batch_of([2, 1, 1, 2]), sequences)
    assert part.shared is not None
    assert part.shared.responses.tolist() == [0, 1, 2]
    assert part.shared.longest[1] == 2


def test_an_empty_response_leaves_its_group_together() -> None:
    batch = batch_of([5, 0, 4, 0, 3, 0], group=3)
    [[sequences]] = plan_micro_batches(batch, 1, 1000, flat=True)
    assert sorted(s.rows for s in sequences) == [(0, 2), (4,)]


def test_neighbours_with_other_prompts_share_none() -> None:
    batch = batch_of([5, 5, 5, 5], group=1)
    assert [len(s.rows) for part in plan_micro_batches(batch, 1, 1000, flat=True)[0] for s in part] == [1] * 4


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
        return query + 1 if flash.takes(query.shape[-1]) else query - 1

    compiled = torch.compile(asked, dynamic=True, fullgraph=True, backend="eager")
    assert [compiled(torch.zeros(2, size)).max().item() for size in (64, 12, 256, 264)] == [1, -1, 1, -1]
