"""Properties and edge cases of the policy losses and the value loss."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ragged_batches import ALL_LOSSES, LOSSES, Columns, batch, evaluate, quick, seeds, spoil_masked

import rlgraph.algorithms as alg
from rlgraph.errors import DataError, GraphError

every_loss = pytest.mark.parametrize("name", ALL_LOSSES)
HORIZON = {"seq-mean-token-sum-norm": 40}


def split(columns: Columns, parts: int) -> list[Columns]:
    bounds = [round(part * 8 / parts) for part in range(parts + 1)]
    return [{key: column[a:b] for key, column in columns.items()} for a, b in itertools.pairwise(bounds)]


@every_loss
@quick
@given(seeds)
def test_tokens_outside_of_the_mask_have_no_gradient_whatever_they_hold(name: str, seed: int) -> None:
    columns = batch(seed)
    mask, spoilt = columns["response_mask"], spoil_masked(columns)
    plain, spoilt_result = evaluate(ALL_LOSSES[name], columns), evaluate(ALL_LOSSES[name], spoilt)
    assert torch.equal(plain[1], spoilt_result[1])
    assert plain[0] == spoilt_result[0]
    assert plain[2] == spoilt_result[2]
    assert torch.count_nonzero(plain[1][~mask]) == 0


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(seeds, st.sampled_from([2, 3, 8]))
def test_splitting_over_micro_batches_and_ranks_changes_nothing(name: str, seed: int, parts: int) -> None:
    columns = batch(seed, dtype=torch.float32)
    totals = alg.Totals.of(columns["response_mask"])
    whole, gradient, metrics = evaluate(LOSSES[name], columns)
    pieces = [evaluate(LOSSES[name], part, totals) for part in split(columns, parts)]
    assert float(sum(piece[0] for piece in pieces) - whole) == pytest.approx(0, abs=1e-6)
    assert torch.allclose(torch.cat([piece[1] for piece in pieces]), gradient, atol=1e-6, rtol=0)
    for key, value in metrics.items():
        assert sum(piece[2][key] for piece in pieces) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("mode", alg.AGGREGATIONS)
@quick
@given(seeds)
def test_every_aggregation_is_the_same_however_the_batch_is_split_and_padded(mode: str, seed: int) -> None:
    columns = batch(seed, dtype=torch.float32)
    totals = alg.Totals.of(columns["response_mask"])
    loss = alg.ClippedLoss(aggregation=mode, horizon=HORIZON.get(mode))
    whole = evaluate(loss, columns)[0]
    pieces = [
        {key: c[:, : int(part["response_mask"].any(0).nonzero().max()) + 1] if c.ndim == 2 else c for key, c in part.items()}
        for part in split(columns, 4)
        if bool(part["response_mask"].any())
    ]
    assert float(sum(evaluate(loss, piece, totals)[0] for piece in pieces)) == pytest.approx(float(whole), abs=1e-6 * max(1, totals.tokens))


@pytest.mark.parametrize("name", [name for name in ALL_LOSSES if name not in ("clip_cov", "kl_cov")])  # which draw tokens by their place
@quick
@given(seeds, st.sampled_from([mode for mode in alg.AGGREGATIONS if mode.startswith("seq-")]))
def test_a_row_that_is_masked_out_is_as_good_as_left_out(name: str, seed: int, mode: str) -> None:
    loss = ALL_LOSSES[name]
    if getattr(loss, "only_aggregation", None) is None and not isinstance(loss, alg.Bypass):
        loss = dataclasses.replace(loss, aggregation=mode, horizon=HORIZON.get(mode))
    columns = batch(seed)
    kept = torch.arange(8) % 2 == 0
    masked = {**columns, "response_mask": columns["response_mask"] & kept[:, None]}
    left = {key: column[kept] for key, column in columns.items()}
    (value, gradient, metrics), (alone, own, told) = evaluate(loss, masked), evaluate(loss, left)
    assert float(value) == pytest.approx(float(alone), abs=1e-12)
    assert torch.allclose(gradient[kept], own, atol=1e-12, rtol=0)
    assert metrics == pytest.approx(told, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in ALL_LOSSES if name != "clip_cov"])  # which drops random tokens
@quick
@given(seeds)
def test_the_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    columns = batch(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    plain = evaluate(ALL_LOSSES[name], columns)
    shuffled = evaluate(ALL_LOSSES[name], {key: column[order] for key, column in columns.items()})
    assert float(plain[0]) == pytest.approx(float(shuffled[0]), abs=1e-12)
    assert torch.allclose(plain[1][order], shuffled[1], atol=1e-12, rtol=0)


@every_loss
def test_gradients_agree_with_finite_differences(name: str) -> None:
    loss = ALL_LOSSES[name]
    columns = batch(2, rows=4, length=4)
    del columns["rollout_is_weights"]
    # Weights and gates that pass no gradient are constants of the loss, not of the finite difference.
    if name in ("gspo", "cispo", "dppo_tv", "dppo_kl", "bypass_clipped", "bypass_reinforce", "proximal", "kl_and_entropy"):
        expected = _straight_through(name, columns)
        assert torch.allclose(evaluate(loss, columns)[1], expected, atol=1e-9)
        return
    log_probs = columns["log_probs"].requires_grad_()
    totals = alg.Totals.of(columns["response_mask"])
    assert torch.autograd.gradcheck(lambda lp: loss(lp, columns, totals)[0], (log_probs,), eps=1e-7, atol=1e-5)


def _straight_through(name: str, columns: Columns) -> torch.Tensor:
    """Return the gradient by hand of the losses that stop it somewhere, for each token."""
    mask, a, lp = columns["response_mask"], columns["advantages"], columns["log_probs"]
    old, rollout = columns["old_log_probs"], columns["rollout_log_probs"]
    ratio, tokens = (lp - old).exp(), mask.sum()

    def unclipped(r: torch.Tensor) -> torch.Tensor:
        return ((a > 0) & (r <= 1.2)) | ((a < 0) & (r >= 0.8) & (r <= 3))

    if name == "gspo":
        s = (torch.where(mask, lp - old, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
        within = ((a > 0) & (s <= 1.2)) | ((a < 0) & (s >= 0.8))
        return torch.where(mask & within, -a * s, 0.0) / mask.sum(-1, keepdim=True) / len(mask)
    if name == "cispo":
        return torch.where(mask, -a * ratio.clamp(0.8, 1.2), 0.0) / tokens
    if name.startswith("dppo"):
        p, q = old.exp(), lp.exp()
        moved = q - p if name == "dppo_tv" else (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()) * (q - p).sign()
        within = torch.where(a > 0, moved <= 0.2, moved >= -0.2)
        return torch.where(mask & within, -a * ratio.clamp(max=20), 0.0) / tokens
    if name == "bypass_clipped":
        kept = LOSSES[name].correction.acceptance_mask(lp, rollout, mask)
        r = (lp - rollout).exp()
        return torch.where(kept & unclipped(r), -a * r, 0.0) / tokens
    if name == "bypass_reinforce":
        return torch.where(mask, -a * alg.IcePop()(lp, rollout, mask), 0.0) / tokens
    if name == "proximal":
        proximal = alg.proximal_log_probs(lp, rollout, columns["weight_version"], 4)
        r = (lp - proximal).exp()
        return torch.where(mask & unclipped(r), -a * r * (proximal - rollout).exp().clamp(max=5), 0.0) / tokens
    kl = 0.1 * (lp - columns["ref_log_probs"])  # the gradient of k2
    return torch.where(mask, torch.where(unclipped(ratio), -a * ratio, 0.0) + kl, 0.0) / tokens


@every_loss
def test_an_empty_mask_gives_zero_loss_and_gradient(name: str) -> None:
    columns = batch(0)
    columns["response_mask"].fill_(False)
    value, gradient, metrics = evaluate(ALL_LOSSES[name], columns)
    assert value == 0
    assert torch.count_nonzero(gradient) == 0
    assert not any(metrics.values())


@every_loss
def test_a_micro_batch_of_no_rows_adds_nothing(name: str) -> None:
    columns = {key: column[:0] for key, column in batch(0).items()}
    value, gradient, metrics = evaluate(ALL_LOSSES[name], columns, alg.Totals(20, 8))
    assert value == 0
    assert gradient.shape == (0, 9)
    assert not any(metrics.values())


@every_loss
def test_log_ratios_far_beyond_the_clamp_stay_finite(name: str) -> None:
    columns = batch(0, dtype=torch.float32)
    columns["old_log_probs"] = columns["rollout_log_probs"] = torch.full((8, 9), -300.0)
    if name in ("gmpo", "dro"):
        columns["old_log_probs"] = torch.full((8, 9), -60.0)
    value, gradient, _ = evaluate(ALL_LOSSES[name], columns)
    assert bool(value.isfinite())
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", ["clipped_without_dual", "sapo", "clip_cov", "kl_cov"])
def test_a_clamped_ratio_has_no_slope(name: str) -> None:
    columns = batch(0)
    columns["old_log_probs"] = torch.full((8, 9), -300.0, dtype=torch.float64)
    assert not evaluate(ALL_LOSSES[name], columns)[1].any()


def test_entropy_and_kl_terms_add_up_with_their_coefficients() -> None:
    columns = batch(7)
    plain = evaluate(alg.ClippedLoss(), columns)[0]
    value, _, metrics = evaluate(alg.ClippedLoss(entropy_coef=0.3, kl_coef=0.2, kl_estimator="k2"), columns)
    mask = columns["response_mask"]
    kl = 0.5 * (columns["log_probs"] - columns["ref_log_probs"]).square()[mask].mean()
    assert metrics["actor/entropy"] == pytest.approx(float(columns["entropy"][mask].mean()))
    assert metrics["actor/kl_loss"] == pytest.approx(float(kl))
    assert float(value) == pytest.approx(float(plain) - 0.3 * metrics["actor/entropy"] + 0.2 * metrics["actor/kl_loss"])
    assert metrics["actor/pg_loss"] == pytest.approx(float(plain))


def test_a_loss_reads_the_columns_its_options_need() -> None:
    assert alg.ClippedLoss().reads == ("old_log_probs", "advantages")
    assert alg.ClippedLoss(kl_coef=0.1).reads == ("old_log_probs", "advantages", "ref_log_probs")
    assert alg.Reinforce().reads == ("advantages",)
    assert alg.Bypass().reads == ("rollout_log_probs", "advantages")
    assert alg.ValueLoss(clip=None).reads == ("returns",)
    assert alg.ClippedLoss(entropy_coef=0.1).needs_entropy
    assert not alg.ClippedLoss().needs_entropy


def test_clip_cov_draws_from_a_generator_of_its_own() -> None:
    columns = batch(0)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = evaluate(alg.ClipCov(fraction=0.3, low=0.01), columns)[1]
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(evaluate(alg.ClipCov(fraction=0.3, low=0.01), columns)[1], first)
    assert not torch.equal(evaluate(alg.ClipCov(fraction=0.3, low=0.01, seed=5), columns)[1], first)


def test_kl_cov_names_the_absolute_log_ratio_apart() -> None:
    columns = batch(0)
    metrics = evaluate(alg.KlCov(), columns)[2]
    difference = (columns["log_probs"] - columns["old_log_probs"])[columns["response_mask"]]
    assert metrics["actor/ppo_kl"] == pytest.approx(-float(difference.mean()))
    assert metrics["actor/ppo_kl_abs"] == pytest.approx(float(difference.abs().mean()))


def test_value_loss_agrees_with_finite_differences_and_ignores_what_is_masked() -> None:
    columns = batch(3, rows=4, length=4)
    columns["returns"] = torch.where(columns["response_mask"], columns["returns"], float("nan"))
    values = columns["log_probs"].requires_grad_()
    totals = alg.Totals.of(columns["response_mask"])
    for clip in (0.3, None):
        assert torch.autograd.gradcheck(lambda v, c=clip: alg.ValueLoss(clip=c)(v, columns, totals)[0], (values,), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: alg.ClippedLoss(aggregation="mean"), r"ClippedLoss\(aggregation='mean'\).*token-mean"),
        (lambda: alg.ClippedLoss(aggregation="seq-mean-token-sum-norm"), "horizon is a whole number"),
        (lambda: alg.ClippedLoss(horizon=10), "only 'seq-mean-token-sum-norm' divides"),
        (lambda: alg.ClippedLoss(clip_low=1.5), r"clip_low=1.5.*at most 1"),
        (lambda: alg.ClippedLoss(clip_c=1.0), "above 1"),
        (lambda: alg.ClippedLoss(kl_coef=-1), "at least 0"),
        (lambda: alg.ClippedLoss(kl_coef=1, kl_estimator="k4"), "one of .*'k3'"),
        (lambda: alg.ClippedLoss(kl_estimator="k2"), "without kl_coef"),
        (lambda: alg.SAPO(aggregation="token-mean"), "only supports 'seq-mean-token-mean'"),
        (lambda: alg.GMPO(aggregation="token-sum"), "only supports 'seq-mean-token-mean'"),
        (lambda: alg.DRO(beta=0), "above 0"),
        (lambda: alg.DPPO("js"), "'tv', 'kl'"),
        (lambda: alg.ClipCov(low=5, high=1), "swap them"),
        (lambda: alg.ValueLoss(clip=0), "above 0"),
        (lambda: alg.Bypass(alg.ClippedLoss(), alg.RolloutCorrection(alg.TruncatedIS())), "correct twice"),
        (lambda: alg.Bypass(alg.Reinforce(), alg.RolloutCorrection(alg.TruncatedIS(normalize=True))), "how the batch is split"),
        (lambda: alg.ProximalLoss(method="cubic"), "'loglinear', 'linear'"),
    ],
)
def test_an_impossible_option_is_refused_when_it_is_given(make: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


@every_loss
def test_log_probs_of_another_shape_than_the_mask_are_refused(name: str) -> None:
    columns = batch(0)
    with pytest.raises(DataError, match=r"log-probs have shape \[8, 8\]"):
        ALL_LOSSES[name](columns["log_probs"][:, :-1], columns, alg.Totals(1, 1), columns["entropy"])


@every_loss
def test_a_mask_that_is_not_bool_is_refused(name: str) -> None:
    columns = batch(0)
    with pytest.raises(DataError, match=r"'response_mask' is torch.float64 .*mask.bool"):
        evaluate(ALL_LOSSES[name], {**columns, "response_mask": columns["response_mask"].double()}, alg.Totals(1, 1))


@every_loss
def test_a_loss_needs_every_column_it_reads_in_its_shape_and_dtype(name: str) -> None:
    columns = batch(0)
    for column in ALL_LOSSES[name].reads:
        without = {key: value for key, value in columns.items() if key != column}
        with pytest.raises(DataError, match=f"column '{column}' is missing .* written by"):
            evaluate(ALL_LOSSES[name], without)
        with pytest.raises(DataError, match=rf"'{column}' .*\[7"):
            evaluate(ALL_LOSSES[name], {**columns, column: columns[column][:-1]})


def test_the_value_loss_needs_its_columns_in_their_shape_and_dtype() -> None:
    columns = batch(0)
    for column in alg.ValueLoss().reads:
        with pytest.raises(DataError, match=rf"'{column}' is torch.float64 of shape \[7, 9\]"):
            alg.ValueLoss()(columns["values"], {**columns, column: columns[column][:-1]}, alg.Totals(1, 1))
    with pytest.raises(DataError, match=r"'response_mask' is torch\.float64"):
        alg.ValueLoss()(columns["values"], {**columns, "response_mask": columns["response_mask"].double()}, alg.Totals(1, 1))


def test_entropy_is_not_broadcast() -> None:
    columns = batch(0)
    with pytest.raises(DataError, match=r"ClippedLoss: column 'entropy' is torch.float64 of shape \[8, 1\]"):
        alg.ClippedLoss(entropy_coef=0.1)(columns["log_probs"], columns, alg.Totals(1, 1), columns["entropy"][:, :1])


def test_the_gradient_of_the_entropy_is_its_coefficient_over_the_tokens() -> None:
    columns = batch(2, rows=4, length=4)
    entropy = columns["entropy"].requires_grad_()
    totals = alg.Totals.of(columns["response_mask"])
    value, _ = alg.ClippedLoss(entropy_coef=0.3)(columns["log_probs"], columns, totals, entropy)
    (gradient,) = torch.autograd.grad(value, entropy)
    assert torch.allclose(gradient, columns["response_mask"].double() * (-0.3 / totals.tokens), atol=1e-12)


@pytest.mark.parametrize("mode", alg.AGGREGATIONS)
def test_an_aggregated_loss_agrees_with_finite_differences(mode: str) -> None:
    columns = batch(5, rows=4, length=4)
    mask = columns["response_mask"]
    losses, totals = columns["advantages"].requires_grad_(), alg.Totals(tokens=30, rows=7)
    assert torch.autograd.gradcheck(lambda x: alg.aggregate(x, mask, totals, mode, HORIZON.get(mode)), (losses,), eps=1e-7, atol=1e-6)


def test_losses_and_masks_of_two_shapes_are_not_aggregated() -> None:
    with pytest.raises(DataError, match=r"aggregate: column 'losses' is torch.float32 of shape \[2, 3\]; with a mask of shape \[2, 1\]"):
        alg.aggregate(torch.zeros(2, 3), torch.ones(2, 1).bool(), alg.Totals(6, 2))
    with pytest.raises(DataError, match=r"'response_mask' is torch\.float32"):
        alg.aggregate(torch.zeros(2, 3), torch.ones(2, 3), alg.Totals(6, 2))
    with pytest.raises(DataError, match=r"Totals.of: 'response_mask' is torch.bool of shape \[2\]"):
        alg.Totals.of(torch.ones(2).bool())


def test_entropy_that_is_needed_and_not_given_is_an_error() -> None:
    columns = batch(0)
    with pytest.raises(DataError, match="there is no entropy"):
        alg.ClippedLoss(entropy_coef=0.1)(columns["log_probs"], columns, alg.Totals(1, 1))
