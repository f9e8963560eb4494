"""Properties and edge cases of the advantage estimators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ragged_batches import ESTIMATORS, GROUPED, batch, quick, seeds, spoil_masked

import rlgraph.algorithms as alg
from rlgraph.errors import DataError, GraphError

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
WHITENING = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-10)


@every_estimator
@quick
@given(seeds)
def test_permuting_rows_permutes_the_advantages(name: str, seed: int) -> None:
    columns = batch(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    plain = ESTIMATORS[name](columns)
    shuffled = ESTIMATORS[name]({key: column[order] for key, column in columns.items()})
    assert all(close(plain[key][order], shuffled[key]) for key in plain)


@pytest.mark.parametrize("name", [*GROUPED, "optimal_token_baseline"])
@quick
@given(seeds)
def test_only_equality_of_group_ids_matters(name: str, seed: int) -> None:
    columns = batch(seed)
    renamed = {**columns, "group_ids": 1000 - 7 * columns["group_ids"]}
    assert close(ESTIMATORS[name](columns)["advantages"], ESTIMATORS[name](renamed)["advantages"])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@quick
@given(seeds, st.floats(-1000, 1000) | st.just(0.1))
def test_equal_rewards_in_a_group_give_exactly_zero(name: str, dtype: torch.dtype, seed: int, reward: float) -> None:
    columns = batch(seed, dtype=dtype)
    columns["rewards"].fill_(reward)
    columns["baseline_rewards"].fill_(reward)
    assert torch.count_nonzero(ESTIMATORS[name](columns)["advantages"]) == 0


@every_estimator
@quick
@given(seeds)
def test_nothing_outside_of_the_mask_matters(name: str, seed: int) -> None:
    columns = batch(seed)
    mask, spoilt = columns["response_mask"], spoil_masked(columns)
    plain, other = ESTIMATORS[name](columns), ESTIMATORS[name](spoilt)
    assert all(torch.equal(plain[key], other[key]) and not plain[key][~mask].any() for key in plain)


@every_estimator
def test_an_empty_mask_gives_zeros(name: str) -> None:
    columns = batch(0)
    columns["response_mask"].fill_(False)
    assert all(torch.count_nonzero(column) == 0 for column in ESTIMATORS[name](columns).values())


@every_estimator
def test_no_rows_give_no_advantages(name: str) -> None:
    written = ESTIMATORS[name]({key: column[:0] for key, column in batch(0).items()})
    assert all(column.shape == (0, 9) for column in written.values())


@every_estimator
def test_it_writes_what_it_declares_in_the_dtype_it_reads(name: str) -> None:
    columns = batch(0, dtype=torch.float32)
    written = ESTIMATORS[name]({key: columns[key] for key in ESTIMATORS[name].reads})
    assert tuple(written) == ESTIMATORS[name].writes
    assert all(column.dtype is torch.float32 and column.shape == (8, 9) for column in written.values())


@every_estimator
def test_a_mask_that_is_not_bool_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"'response_mask' is torch.int64 .*mask.bool"):
        ESTIMATORS[name]({**batch(0), "response_mask": torch.ones(8, 9, dtype=torch.int64)})


@every_estimator
def test_a_missing_column_is_named_with_its_writer(name: str) -> None:
    columns = batch(0)
    del columns[ESTIMATORS[name].reads[0]]
    with pytest.raises(DataError, match=f"column '{ESTIMATORS[name].reads[0]}' is missing .* written by"):
        ESTIMATORS[name](columns)


@every_estimator
def test_a_column_of_another_shape_is_refused(name: str) -> None:
    columns = batch(0)
    first = ESTIMATORS[name].reads[0]
    with pytest.raises(DataError, match=f"column '{first}' is torch.float64 of shape"):
        ESTIMATORS[name]({**columns, first: columns[first][:-1]})


@quick
@given(seeds, st.sampled_from([0.9, 1.0]))
def test_gae_bootstraps_responses_that_were_cut_off_and_no_others(seed: int, gamma: float) -> None:
    columns = batch(seed)
    cut = torch.arange(8) % 3 == 0
    columns["finish_reasons"] = torch.where(cut, 1 + torch.arange(8) % 2, 0).to(torch.int8)
    mask, values = columns["response_mask"], columns["values"]
    # What is worth the value of the last token behind it is as good as a last reward of so much.
    last = torch.where(mask, torch.arange(1, 10), 0).argmax(-1)[:, None]
    worth = torch.where(cut & mask.any(-1), values.gather(1, last)[:, 0], 0.0)
    rewards = columns["token_rewards"].scatter_add(1, last, gamma * worth[:, None])
    plain = alg.GAE(gamma=gamma, lam=0.9)({**columns, "token_rewards": rewards})
    found = alg.GAE(gamma=gamma, lam=0.9, bootstrap=True)(columns)
    assert all(close(found[key], plain[key]) for key in plain)


def test_bootstrapping_needs_the_reasons() -> None:
    assert "finish_reasons" in alg.GAE(bootstrap=True).reads
    assert "finish_reasons" not in alg.GAE().reads
    with pytest.raises(DataError, match=r"'finish_reasons' is missing .* written by 'rollout'"):
        alg.GAE(bootstrap=True)(batch(0))
    with pytest.raises(DataError, match=r"'finish_reasons' is torch.int64 .* int8"):
        alg.GAE(bootstrap=True)({**batch(0), "finish_reasons": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(GraphError, match="bootstrap is True or False"):
        alg.GAE(bootstrap=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WHITENING)
def test_a_single_token_cannot_be_whitened(name: str) -> None:
    columns = batch(0)
    columns["response_mask"] = torch.zeros(8, 9, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    columns["response_mask"][2, 3] = True
    with pytest.raises(DataError, match="one response token"):
        ESTIMATORS[name](columns)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (alg.GRPO(), [-0.70711, 0.70711, 6.99999]),
        (alg.GRPO(singleton="zero"), [-0.70711, 0.70711, 0]),
        (alg.RLOO(), [-2, 2, 7]),
        (alg.RLOO(singleton="zero"), [-2, 2, 0]),
        (alg.OPO(), [-1, 1, 7]),
        (alg.GPG(), [-1, 1, 7]),
        (alg.ReinforcePlusPlusBaseline(), [-0.8951, -0.3581, 1.2532]),
    ],
)
def test_a_group_of_one_keeps_its_reward_unless_told_otherwise(estimator: alg.GRPO, expected: list[float]) -> None:
    columns = {"rewards": torch.tensor([1.0, 3, 7]), "group_ids": torch.tensor([5, 5, 2]), "response_mask": torch.ones(3, 2).bool()}
    assert torch.allclose(estimator(columns)["advantages"][:, 0], torch.tensor(expected).float(), atol=1e-4)


def test_pass_k_refuses_a_group_of_one() -> None:
    with pytest.raises(DataError, match="group_size of at least 2"):
        alg.PassK()({"rewards": torch.ones(1), "group_ids": torch.zeros(1, dtype=torch.int64), "response_mask": torch.ones(1, 1).bool()})


def test_group_ids_must_be_int64() -> None:
    with pytest.raises(DataError, match=r"'group_ids' is torch.int32"):
        alg.GRPO()({**batch(0), "group_ids": torch.zeros(8, dtype=torch.int32)})


def test_discount_steps_over_tool_tokens() -> None:
    columns = {"token_rewards": torch.tensor([[0.0, 0, 0, 1]]), "response_mask": torch.tensor([[1, 0, 1, 1]]).bool()}
    assert torch.allclose(alg.ReinforcePlusPlus(gamma=0.5)(columns)["returns"], torch.tensor([[0.25, 0, 0.5, 1]]))


def test_without_gaps_both_alignments_of_the_token_baseline_agree() -> None:
    columns = batch(5, gaps=False)
    by_column, by_token = (alg.OptimalTokenBaseline(align=align)(columns)["advantages"] for align in ("column", "token"))
    assert close(by_column, by_token)


def test_the_tail_of_the_longest_response_has_no_baseline_even_behind_gaps() -> None:
    columns = batch(0, rows=2, length=5)
    columns["response_mask"] = torch.tensor([[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]]).bool()
    columns["group_ids"] = torch.zeros(2, dtype=torch.int64)
    written = alg.OptimalTokenBaseline()(columns)
    assert torch.equal(written["advantages"][0, 2:], written["returns"][0, 2:])
    assert written["advantages"][0, 0] != written["returns"][0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: alg.GRPO(normalize_std=1), r"GRPO\(normalize_std=1\).*True or False"),
        (lambda: alg.RLOO(singleton="drop"), r"RLOO\(singleton='drop'\).*'reward', 'zero'"),
        (lambda: alg.PassK(singleton="zero"), "no effect"),
        (lambda: alg.GAE(gamma=1.5), r"GAE\(gamma=1.5\).*at most 1"),
        (lambda: alg.GAE(lam=float("nan")), "finite number"),
        (lambda: alg.GPG(f_norm=0), "above 0"),
        (lambda: alg.GDPO(keys=()), "name at least one column"),
        (lambda: alg.GDPO(keys=("a", "b"), weights=(1.0,)), "weights needs one number for each"),
        (lambda: alg.OptimalTokenBaseline(align="row"), r"'column', 'token'"),
    ],
)
def test_an_impossible_option_is_refused_when_it_is_given(make: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
