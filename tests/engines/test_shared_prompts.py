"""Flat passes that compute a prompt once give the log-probs, values and steps of passes in which each response has its own."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs.data_parallel_ranks import run_ranks
from support.families import folder_of
from support.flat_kernel import flash4_on_cpu, flash_on_cpu
from support.tiny import WeightedLikelihood, batch_of, returns_of
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.algorithms import ValueLoss
from rlgraph.batching import packing
from rlgraph.batching.packing import MicroBatch, pack_flat, plan_micro_batches
from rlgraph.engines.forward import flash, packed_attention, self_test
from rlgraph.engines.forward.head import PolicyHead, ValueHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.values.optimizers import AdamW

NEAR = {"atol": 5e-6, "rtol": 5e-6}
PLAIN = {"atol": 2e-5, "rtol": 0}  # transformers' own attention adds up in another order
# A large eps: else Adam makes a whole step of a gradient that is nothing but rounding, and no two ways to sum would agree.
STEP = AdamW(lr=1e-2, eps=1e-3)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe"]  # with a window, soft caps, sinks, experts
LENGTHS = [30, 1, 17, 0, 0, 12, 12, 25, 1, 1, 1, 1]  # groups of four: with an empty response, and with nothing but single tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make() -> Iterator[Any]:
    engines: list[FsdpEngine] = []

    def build(folder: Path, head: Any = PolicyHead, **settings: Any) -> FsdpEngine:
        engines.append(fsdp_engine(head(folder), **{"optimizer": STEP, "dtype": torch.float32, "flat": True} | settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def batch(vocab: int = 96) -> dict[str, torch.Tensor]:
    """Groups of four, with tools' tokens in the responses; the second prompt is one token."""
    found = batch_of(LENGTHS, group=4, holes=True)
    found["prompt_mask"][4:8] = torch.arange(found["prompts"].shape[1]) == found["prompts"].shape[1] - 1
    found["prompts"] = (found["prompts"] % vocab) * found["prompt_mask"]
    return found | {"responses": found["responses"] % vocab}


def weights(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights().items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], **NEAR, msg=lambda text, name=name: f"{name}: {text}")


def test_the_batch_of_these_tests_shares_prompts() -> None:
    [[sequences]] = plan_micro_batches(batch(), 1, 1000, flat=True)
    assert sorted(len(s.rows) for s in sequences) == [1, 1, 1, 3, 4]
    assert pack_flat(batch(), sequences).shared is not None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("limit", [40, 1000], ids=["many passes", "one pass"])
def test_a_family_scores_and_learns_as_with_own_prompts(make: Any, name: str, limit: int, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    shared, own = make(folder, micro_batch_tokens=limit), make(folder, shared=False)
    torch.testing.assert_close(shared.scores(batch()), own.scores(batch()), **NEAR)
    found, expected = (engine.update(batch(), WeightedLikelihood(entropy=0.1)) for engine in (shared, own))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    same(weights(shared), weights(own))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_scores_as_its_own_forward_does_on_each_sequence_alone(make: Any, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = folder_of(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    whole = batch() | {"response_mask": batch_of(LENGTHS, group=4)["response_mask"]}
    rows = whole["response_mask"].any(-1)
    given = {key: whole[key][rows] for key in ("prompts", "prompt_mask", "responses", "response_mask")}
    torch.testing.assert_close(make(folder).scores(whole)[rows], self_test.score_single_rows(model, given), **PLAIN)


def test_a_critic_whose_layers_are_computed_again_learns_as_with_own_prompts(make: Any, tied: Path) -> None:
    data = returns_of(batch())
    shared, own = make(tied, ValueHead, recompute=True), make(tied, ValueHead, shared=False)
    for _ in range(2):  # a new head gives 0 everywhere
        assert shared.update(data, ValueLoss()) == pytest.approx(own.update(data, ValueLoss()), rel=1e-4)
        torch.testing.assert_close(shared.scores(data), own.scores(data), **NEAR)
    same(weights(shared), weights(own))


def test_a_group_split_over_passes_gives_the_same_step(make: Any, tied: Path) -> None:
    data = batch_of([20] * 8, group=8)
    limit = 9 + 3 * 19
    assert len(plan_micro_batches(data, 1, limit, flat=True)[0]) > 1
    split, whole, own = make(tied, micro_batch_tokens=limit), make(tied), make(tied, shared=False)
    for engine in (split, whole, own):
        engine.update(data, WeightedLikelihood())
    same(weights(split), weights(own))
    same(weights(whole), weights(own))


def test_ranks_share_prompts_as_one_process_does(make: Any, tied: Path, tmp_path: Path) -> None:
    ranks = run_ranks("flat", tied, tmp_path, 2)
    data = returns_of(batch_of([7, 2, 5, 5, 1, 12], holes=True))
    own = make(tied, shared=False)
    torch.testing.assert_close(ranks[0]["scores"], own.scores(data), **NEAR)
    for metrics in ranks[0]["metrics"]:
        assert metrics == pytest.approx(own.update(data, WeightedLikelihood(entropy=0.1)), rel=1e-4)
    for name, tensor in own.weights().items():
        torch.testing.assert_close(torch.cat([rank["weights"][name] for rank in ranks]), tensor, **NEAR)


def test_prompts_are_computed_once(make: Any, tied: Path) -> None:
    """The tokens that the layers see are those of the plan, not those of the sequences."""
    data, seen = batch_of([12] * 4, group=4), []
    for shared in (True, False):
        engine = make(tied, shared=shared)
        layer = engine._head.layers[0]
        handle = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
        engine.scores(data)
        handle.remove()
    prompt = int(data["prompt_mask"][0].sum())
    assert seen == [prompt + 4 * 11, 4 * (prompt + 11)]


def test_what_the_engine_computes_by_itself_has_own_prompts() -> None:
    """The engine attends to a prompt at once and to each response by itself, which exact log-probs repeat."""
    pool = rg.Pool("train")
    assert rg.Policy("m", pool=pool).traits.shared_prompts
    assert not rg.Policy("m", pool=pool, exact=True, dtype="float32").traits.shared_prompts
    assert not rg.Policy("m", pool=pool, trainer="megatron").traits.shared_prompts


def pass_of(data: dict[str, torch.Tensor], multiple: int = 8) -> MicroBatch:
    [[sequences]] = plan_micro_batches(data, 1, 1000, flat=True)
    return pack_flat(data, sequences, multiple=multiple)


def drawn(length: int, dtype: torch.dtype, *, narrow: bool = False) -> list[torch.Tensor]:
    """Draw queries, keys and values `[1, H, L, D]`, and sinks."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 4, length, 16), (1, 2, length, 16), (1, 2, length, 8 if narrow else 16), (4,)]
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 5, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow values"])
@pytest.mark.parametrize("kernel", [flash_on_cpu, flash4_on_cpu], ids=["2", "4"])
def test_the_calls_of_the_kernel_give_output_and_gradients_of_each_sequence_alone(
    window: int | None, sinks: bool, narrow: bool, kernel: Any
) -> None:
    """With the kernel of a GPU in PyTorch, in float64: what is merged is exact."""
    part = pass_of(batch())
    given = drawn(part.tokens.shape[1], torch.float64, narrow=narrow)
    leaves, sink = given[: 3 + sinks], given[3] if sinks else None
    settings = {"cu_seq_lens_q": part.starts, "max_length_q": part.longest, "shared_prompts": part.shared, "s_aux": sink}
    plain, _ = packed_attention.attend(None, *given[:3], None, sliding_window=window, **settings)
    up = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(plain, leaves, up)
    assert part.starts is not None
    with kernel():
        out = flash.flash(*given[:3], part.starts, part.longest, None, window, sink, part.shared)[None]
        grads = torch.autograd.grad(out, leaves, up)
    near = {"atol": 1e-5 if sinks or window == 5 else 1e-10, "rtol": 0}  # shares of sinks, and sums over gathered keys, are float32
    torch.testing.assert_close(out, plain, **near)
    for found, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, expected, **near)


@pytest.mark.stage("families")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports and does
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # between two graphs
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kernel", [flash_on_cpu, flash4_on_cpu], ids=["2", "4"])
def test_a_compiled_layer_has_the_gradients_of_an_eager_one_for_passes_of_any_size(window: int | None, sinks: bool, kernel: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash.flash, dynamic=True, fullgraph=not sinks, backend="aot_eager")  # sinks stay outside of a graph
    with kernel(), torch._dynamo.config.patch(error_on_recompile=True):
        for groups in (6, 9):  # counts that are no number of heads, which a graph would take them for
            part = pass_of(batch_of([30, 9, 17, 12 + groups] * groups, group=4))
            given = drawn(part.tokens.shape[1], torch.float32)
            leaves = given[: 3 + sinks]
            found = []
            for attend in (flash.flash, compiled):
                out = attend(*given[:3], part.starts, part.longest, None, window, given[3] if sinks else None, part.shared)
                found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
            for eager, other in zip(*found, strict=True):
                torch.testing.assert_close(other, eager, **NEAR)


@pytest.mark.parametrize("kernel", [flash_on_cpu, flash4_on_cpu], ids=["2", "4"])
@pytest.mark.parametrize("window", [None, 5])
def test_own_prompts_have_output_and_gradients_of_each_sequence_alone(window: int | None, kernel: Any) -> None:
    starts, given = torch.tensor([0, 30, 39, 56], dtype=torch.int32), drawn(56, torch.float64)[:3]
    plain, _ = packed_attention.attend(None, *given, None, sliding_window=window, cu_seq_lens_q=starts, max_length_q=30)
    with kernel():
        out = flash.flash(*given, starts, 30, None, window, None)[None]
        grads = torch.autograd.grad(out.square().sum(), given)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.square().sum(), given))


def test_two_attentions_are_merged_by_their_sums() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, values = torch.randn(3, 5, 12, generator=draw, dtype=torch.float64), torch.randn(12, 3, 4, generator=draw, dtype=torch.float64)
    whole = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    halves = [
        (torch.einsum("hqk,khd->qhd", scores[..., own].softmax(-1), values[own]), scores[..., own].logsumexp(-1))
        for own in (slice(4), slice(4, 12))
    ]
    out, sums = flash.merge_attention(*halves[0], *halves[1])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(sums, scores.logsumexp(-1))


def test_a_window_counts_the_tokens_of_a_sequence_and_not_those_between() -> None:
    """A prompt of four tokens, and behind it two responses of two: with equal scores each token gives equal weight to all that it sees."""
    segments, positions = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2]]), torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]])
    same, values = torch.zeros(1, 1, 8, 8), torch.eye(8)[None, None]
    mask = packing._mask(segments)
    out, _ = packed_attention.attend_rows(SimpleNamespace(), same, same, values, mask, shared_positions=positions, sliding_window=3)
    seen = [row.nonzero()[:, 0].tolist() for row in out[0, :, 0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [2, 3, 6], [3, 6, 7]]
