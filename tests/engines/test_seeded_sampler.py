"""SGLang's sampler draws by seed and position alone, from the distribution that its log-probs are of."""

import pytest
import torch

from rlgraph.engines.sglang.start import GREEDY, sample, uniform
from rlgraph.engines.transformers.engine import _filter_logits
from rlgraph.values.sampling import Sampling

ROWS, VOCAB = 6, 50


def drawn(
    logits: torch.Tensor, *, temperature: float = 1.0, min_p: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(logits)
    return sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), min_p),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k or 1 << 30, dtype=torch.int32),
        torch.full((rows,), seed),
        torch.arange(rows),
    )


@pytest.fixture
def logits() -> torch.Tensor:
    return 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)
    tokens, _ = drawn(logits)
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(shares, logits[0].exp(), atol=0.03, rtol=0)


def test_a_row_does_not_depend_on_the_others(logits: torch.Tensor) -> None:
    together = drawn(logits, top_p=0.8)[0].tolist()
    args = (torch.ones(1), torch.zeros(1), torch.full((1,), 0.8), torch.full((1,), 1 << 30, dtype=torch.int32), torch.tensor([3]))
    assert [int(sample(logits[row : row + 1], *args, torch.tensor([row]))[0]) for row in range(ROWS)] == together
    assert drawn(logits, top_p=0.8, seed=4)[0].tolist() != together


@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 0.7},
        {"top_k": 5},
        {"top_p": 0.6, "top_k": 9, "temperature": 0.5},
        {"top_p": 1e-9},
        {"top_k": VOCAB},
        {"min_p": 0.3, "top_p": 0.9},
    ],
)
def test_log_probs_leave_out_what_min_p_top_p_and_top_k_do(logits: torch.Tensor, limits: dict[str, float]) -> None:
    sampling = Sampling(**limits)  # type: ignore[arg-type]
    expected = _filter_logits(logits / sampling.temperature, sampling).log_softmax(-1)
    for seed in range(20):
        tokens, log_probs = drawn(logits, seed=seed, **limits)  # type: ignore[arg-type]
        torch.testing.assert_close(log_probs, expected.gather(-1, tokens[:, None])[:, 0])


def test_rows_of_one_batch_are_filtered_each_by_its_own_limits(logits: torch.Tensor) -> None:
    top_ps, top_ks = torch.tensor([1.0, 0.5, 1.0, 0.9, 1.0, 0.3]), torch.tensor([1 << 30, 1 << 30, 3, 7, 1, 2])
    min_ps, seeds = torch.tensor([0.2, 0.0, 0.0, 0.9, 0.0, 0.1]), torch.tensor([1, 2, 3, GREEDY, 5, 6])
    tokens, log_probs = sample(logits, torch.ones(ROWS), min_ps, top_ps, top_ks, seeds, torch.arange(ROWS))
    for row in range(ROWS):
        greedy = seeds[row] == GREEDY
        limits = {"min_p": float(min_ps[row]), "top_p": float(top_ps[row]), "top_k": int(top_ks[row]) % (1 << 30)}
        sampling = Sampling() if greedy else Sampling(**limits)  # type: ignore[arg-type]
        assert not greedy or tokens[row] == logits[row].argmax()
        torch.testing.assert_close(log_probs[row], _filter_logits(logits[row : row + 1], sampling).log_softmax(-1)[0, tokens[row]])


def test_numbers_are_even_and_differ_by_seed_and_by_position() -> None:
    numbers = uniform(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert len(set(numbers.tolist())) == len(numbers)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers, 10, 0, 1)
    assert counts.min() > 800
    assert counts.max() < 1200
    by_seed = numbers.view(100, 100)
    assert by_seed.mean(0).sub(0.5).abs().max() < 0.15, "at one position seeds differ"
