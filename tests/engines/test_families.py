"""rlgraph treats each family of models as docs/developers/families.md says, and no engine gives other log-probs without a word."""

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from copy import deepcopy
from itertools import cycle, islice, product, repeat
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from support.families import folder_of, is_listed_by_its_text_model, names, outcome, table_row, tiny_folder
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.batching.packing import response_lengths
from rlgraph.engines.forward import flash, packed_attention, self_test
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.forward.self_test import VOCAB
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.sharding import local
from rlgraph.engines.hf.model_files import in_text_model
from rlgraph.engines.hf.pretrained import byte_tokenizer
from rlgraph.engines.lora import A, B
from rlgraph.engines.transformers.engine import TransformersEngine
from rlgraph.errors import DataError, GraphError
from rlgraph.settings import Recompute
from rlgraph.values.lora import FAMILIES as ADAPTED
from rlgraph.values.optimizers import AdamW
from rlgraph.values.sampling import Sampling

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "families.md"
ROWS = dict(re.findall(r"^(?=\| (.+?) \|)(.+)$", PAGE.read_text(), re.MULTILINE)[1:])
WAYS: dict[str, tuple[str, str, dict[str, bool]]] = {  # the column of a layout, what is in it where the layout is used, and its settings
    "padded": ("padded", "right", {"flat": False, "shared": False}),
    "shared": ("shared", "right", {"flat": False}),
    "flat": ("flat", "right", {"flat": True}),
    "flat with own prompts": ("flat", "right|own prompts", {"flat": True, "shared": False}),
}
QUICK = {"gemma2", "gpt_oss", "bloom"}
NEAR, CLOSE = 1e-3, 1e-4
RECOMPUTE: tuple[Recompute, ...] = (False, True, "selective")
LORA = rg.LoRA(rank=2, alpha=4)


pytestmark = pytest.mark.usefixtures("one_thread")


def own_scores(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return self_test.score_single_rows(model.eval(), batch)


def ragged_batch() -> dict[str, torch.Tensor]:
    """Make rows on both sides of a window of 24, with gaps in their masks, and one without a response."""
    draw, shape = torch.Generator().manual_seed(3), ((30, (40, 12, 25)), (9, (1, 7)), (12, (14,)), (3, (0, 30)))
    sizes = [(group, prompt, size) for group, (prompt, responses) in enumerate(shape) for size in responses]
    lengths = torch.tensor([size for *_, size in sizes])
    prompts = torch.randint(1, VOCAB, (len(shape), 30), generator=draw)[[group for group, *_ in sizes]]
    prompt_mask = torch.arange(30)[None] >= 30 - torch.tensor([prompt for _, prompt, _ in sizes])[:, None]
    mask = torch.arange(40)[None] < lengths[:, None]
    responses = torch.randint(1, VOCAB, mask.shape, generator=draw) * mask
    mask[0, 5:9] = mask[2, :3] = mask[4, 2] = False
    batch = {"prompts": prompts * prompt_mask, "prompt_mask": prompt_mask, "responses": responses, "response_mask": mask}
    return batch | {"advantages": torch.randn(mask.shape, generator=draw)}


def own_update(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute log-probs and gradients of `WeightedLikelihood` by a model's own forward over each row alone."""
    mask, found, loss = batch["response_mask"], torch.zeros(batch["responses"].shape), torch.zeros(())
    for row, size in enumerate(response_lengths(mask).tolist()):
        tokens = torch.cat([batch["prompts"][row][batch["prompt_mask"][row]], batch["responses"][row, :size]])
        table = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
        scores = table[len(tokens) - size - 1 : -1].gather(-1, tokens[len(tokens) - size :, None])[:, 0]
        found[row, :size] = scores.detach()
        loss = loss - (scores * batch["advantages"][row, :size] * mask[row, :size]).sum() / mask.sum()
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return found * mask, {in_text_model(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_update(engine: FsdpEngine, batch: dict[str, torch.Tensor], scores: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    found: dict[str, torch.Tensor] = {}

    def take(metrics: Mapping[str, float]) -> bool:
        found.update({name: local(p.grad).clone() for name, p in engine.trained_parameters().items() if p.grad is not None})
        return False

    torch.testing.assert_close(engine.scores(batch), scores, atol=CLOSE, rtol=0)
    engine.update(batch, WeightedLikelihood(), guard=take)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name in {*found, *gradients}:
        zero = torch.zeros(())
        assert (found.get(name, zero) - gradients.get(name, zero)).norm() <= CLOSE * norm, name


def adapted(model: Any, engine: FsdpEngine, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute what `own_update` does with an engine's adapters merged: the gradients of matrices give those of their factors."""
    merged, factors = deepcopy(model), engine.weights()
    found: dict[str, torch.Tensor] = {}
    for name in (name.removesuffix(A) for name in factors if name.endswith(A)):
        merged.get_submodule(name).weight.data += LORA.scale * factors[name + B] @ factors[name + A]
    scores, gradients = own_update(merged, batch)
    for name in (name.removesuffix(A) for name in factors if name.endswith(A)):
        gradient = LORA.scale * gradients[f"{name}.weight"]
        found |= {name + A: factors[name + B].T @ gradient, name + B: gradient @ factors[name + A].T}
    return scores, found


def trainings(name: str, ways: list[dict[str, bool]]) -> Iterable[tuple[dict[str, bool], Recompute, rg.LoRA | None]]:
    """Pair layouts with values of `recompute`: all in the quick families and those with adapters, in another each of both at least once."""
    if name in ADAPTED:
        return [(way, RECOMPUTE[j], LORA if (i + j) % 2 else None) for i, way in enumerate(ways) for j in range(len(RECOMPUTE))]
    if name in QUICK:
        return [(way, recompute, None) for way, recompute in product(ways, RECOMPUTE)]
    values = islice(cycle(RECOMPUTE), list(ROWS).index(name) % len(RECOMPUTE), None)  # other pairs in the next family
    return zip(islice(cycle(ways), max(len(ways), len(RECOMPUTE))), values, repeat(None), strict=False)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.stage("families")) for name in ROWS])
def test_log_probs_and_gradients_of_a_family_are_its_own_or_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words, why = outcome(name, tmp_path)
    assert ROWS[name] == table_row(name, words, why), (
        "docs/developers/families.md is of another library: python tests/support/families.py docs/developers/families.md"
    )
    if "right" not in words.values() or is_listed_by_its_text_model(name):
        return
    (folder, model), batch = tiny_folder(name, tmp_path), ragged_batch()
    own = own_update(model, batch)
    for settings, recompute, adapter in trainings(name, [way for column, used, way in WAYS.values() if re.fullmatch(used, words[column])]):
        more = {"optimizer": AdamW(grad_clip=1e9), "dtype": torch.float32, "recompute": recompute, "adapter": adapter}
        with closing(fsdp_engine(PolicyHead(folder), **more, **settings)) as engine:
            for factor in engine.weights().values() if adapter else ():
                factor.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
            check_update(engine, batch, *(adapted(model, engine, batch) if adapter else own))
    if words["generator"] == "right":
        generator = TransformersEngine(folder, dtype=torch.float32, max_context=256)
        prompts = [prompt[mask].tolist() for prompt, mask in zip(batch["prompts"], batch["prompt_mask"], strict=True)]
        responses = generator.generate(prompts, Sampling(max_tokens=16, ignore_eos=True), list(range(len(prompts))))
        written = {"responses": torch.tensor([r.tokens for r in responses]), "response_mask": torch.ones(len(prompts), 16).bool()}
        asked = {"prompts": batch["prompts"], "prompt_mask": batch["prompt_mask"], **written}
        sampled = torch.tensor([r.log_probs for r in responses])
        torch.testing.assert_close(sampled, self_test.score_single_rows(model, asked), atol=NEAR, rtol=0)


def test_a_model_that_fails_in_the_dtype_of_its_trainer_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = tiny_folder("minimax", tmp_path)  # whose tables stay in float32
    with pytest.raises(DataError, match=r"\(minimax\): rlgraph's log-probs differ from .*: in bfloat16 RuntimeError: expected m1 and m2"):
        self_test.trainer_layout(folder, flat=False, dtype=torch.bfloat16)
    assert self_test.trainer_layout(folder, flat=False) == self_test.BatchLayout(flat=False, shared=False, note=ANY)


def test_a_model_that_refuses_to_be_trained_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise AssertionError("put the model into training mode")

    folder = folder_of("llama", tmp_path)
    model = self_test.small_model(folder)
    model.get_input_embeddings().weight.register_hook(refuse)
    monkeypatch.setattr(self_test, "_FOUND", {})
    monkeypatch.setattr(self_test, "small_model", lambda path: model)
    with pytest.raises(DataError, match=r"\(llama\): rlgraph's log-probs differ from .*: AssertionError: put the model into training mode"):
        self_test.trainer_layout(folder, flat=False)


def test_the_table_has_all_causal_types_of_transformers() -> None:
    assert list(ROWS) == names()


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
ROTATIONS: dict[str, tuple[str, dict[str, Any]]] = {  # of 60 tokens at most
    "longrope": ("phi3", {"original_max_position_embeddings": 60, "rope_parameters": {**LONGROPE, "rope_theta": 10000.0}}),
    "dynamic": ("llama", {"max_position_embeddings": 60, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
}


def rotating(name: str, folder: Path) -> Path:
    """Make a model whose rotary factors depend on the longest row of a batch, from 60 tokens on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = ROTATIONS[name]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ids, **settings)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("flat", [False, True])
def test_rows_beside_others_have_the_rotary_factors_of_a_row_alone_or_are_refused(name: str, flat: bool, tmp_path: Path) -> None:
    folder, batch = rotating(name, tmp_path / name), self_test._batch()
    short = {column: values[2:] for column, values in batch.items()}  # of at most 54 tokens; a prompt and its responses have more
    with closing(fsdp_engine(PolicyHead(folder), optimizer=AdamW(), dtype=torch.float32, flat=flat)) as engine:
        torch.testing.assert_close(engine.scores(short), own_scores(folder, short), atol=NEAR, rtol=0)
        with pytest.raises(DataError, match=r"a row has 70 tokens, but beyond 60 the model's rotary factors depend"):
            engine.scores(batch)


@pytest.mark.parametrize(("engine", "most", "refuses"), [("vllm", 60, ""), ("vllm", 61, "old_log_probs"), ("transformers", 61, "rollout")])
def test_a_generator_writes_no_rows_that_its_trainer_would_rotate_otherwise(engine: str, most: int, refuses: str, tmp_path: Path) -> None:
    folder = str(rotating("longrope", tmp_path / "phi3"))
    generator = rg.Generator(
        folder, pool=rg.Pool("rollout"), engine=engine, max_context=most, sampling=rg.Sampling(max_tokens=4), dtype="float32"
    )
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], 1))
    scores = rg.Policy(folder, pool=rg.Pool("train"), self_test=False).log_probs(rollout)
    for node in (rollout.node, scores.node):
        if node.name != refuses:
            node.operation.check(node)
            continue
        with pytest.raises(GraphError, match=rf"'{refuses}' .* rows of up to 61 tokens .* set Generator\(max_context=\) to at most 60"):
            node.operation.check(node)
        return


LACKING = {"mistral": "sliding_window", "gemma2": "softcap", "gpt_oss": "s_aux"}


@pytest.mark.parametrize(("name", "setting"), LACKING.items())
def test_the_start_finds_an_attention_that_leaves_a_setting_out(
    name: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name, tmp_path)
    monkeypatch.setattr(self_test, "_FOUND", {})
    for place in ("attend", "attend_rows"):
        whole = getattr(packed_attention, place)
        monkeypatch.setattr(packed_attention, place, lambda *given, whole=whole, **more: whole(*given, **{**more, setting: None}))
    found = self_test.trainer_results(folder)
    assert found["flat"].off > 0.05
    assert found["shared"].off > 0.05
    assert found["flat with shared prompts"].off > 0.05
    if name != "mistral":  # whose padded rows have the window in the mask that the model makes
        with pytest.raises(DataError, match=rf"\({name}\): rlgraph's log-probs differ from the model's own forward pass.*self_test=False"):
            self_test.trainer_layout(folder, flat=False)


def test_a_process_tests_each_configuration_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, ...]] = []

    def results(path: Path, ways: tuple[str, ...], **place: object) -> dict[str, self_test.SelfTestResult]:
        tried.append(ways)
        return {way: self_test.SelfTestResult(0.0 if way != "flat" else 1.0) for way in ways}

    monkeypatch.setattr(self_test, "_FOUND", {})
    monkeypatch.setattr(self_test, "trainer_results", results)
    layouts = [self_test.trainer_layout(folder_of("llama", tmp_path / folder), flat=flat) for folder in "ab" for flat in (False, True)]
    assert [layout.flat for layout in layouts] == [False] * 4
    assert tried == [("padded", "shared"), ("flat", "flat with shared prompts")]
    self_test.trainer_layout(folder_of("mistral", tmp_path), flat=False)
    self_test.trainer_layout(tmp_path / "a" / "llama", flat=False, dtype=torch.bfloat16)
    assert tried[2:] == [("padded", "shared")] * 2
    config = tmp_path / "b" / "llama" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta"', '"rope_theta_"'))
    self_test.trainer_layout(config.parent, flat=False)
    assert len(tried) == 5


def test_a_setting_that_attention_does_not_know_is_refused_by_name() -> None:
    x = torch.zeros(1, 1, 4, 8)
    for attend in (packed_attention.attend, packed_attention.attend_rows):
        with pytest.raises(DataError, match="Linear asks its attention for \\['tree_bias'\\]"):
            attend(torch.nn.Linear(1, 1), x, x, x, None, tree_bias=1, position_ids=x)


def test_a_model_gets_another_layout_if_the_one_asked_for_is_wrong(tmp_path: Path) -> None:
    layout = self_test.trainer_layout(folder_of("lfm2", tmp_path), flat=True)
    assert (layout.flat, layout.shared) == (False, False)
    assert "(lfm2): batches are padded, each response with its own prompt" in layout.note
    assert "convolution over time" in layout.note
    assert self_test.trainer_layout(folder_of("llama", tmp_path), flat=True) == self_test.BatchLayout(flat=True, shared=True)


def test_a_model_whose_flat_rows_are_right_with_own_prompts_alone_gets_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(path: Path, ways: tuple[str, ...], **place: object) -> dict[str, self_test.SelfTestResult]:
        return {way: self_test.SelfTestResult(2.0 if way == self_test.FLAT_SHARED else 0.0) for way in ways}

    monkeypatch.setattr(self_test, "_FOUND", {})
    monkeypatch.setattr(self_test, "trainer_results", results)
    folder = folder_of("llama", tmp_path)
    layout = self_test.trainer_layout(folder, flat=True)
    assert (layout.flat, layout.shared) == (True, False)
    assert layout.note == (
        f"model '{folder}' (llama): each response has its own prompt, since rlgraph cannot share prompts in flat passes "
        "(its log-probs are off by 2 nats)"
    )
    assert self_test.trainer_layout(folder, flat=True, shared=False) == self_test.BatchLayout(flat=True, shared=False)


def test_sinks_added_to_a_kernels_output_give_output_and_gradients_of_the_attention_with_sinks() -> None:
    """The kernel of a GPU, in PyTorch: given output and sums with the sink in them, the backward pass is that with the sink."""
    draw = torch.Generator().manual_seed(0)
    length, heads, size = 12, 3, 8
    q, k, v, up = torch.randn(4, length, heads, size, generator=draw, dtype=torch.float64)
    sinks = torch.randn(heads, generator=draw, dtype=torch.float64)
    given = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    mask = torch.ones(length, length).tril().bool()
    scores = torch.einsum("qhd,khd->hqk", given[0], given[1]).masked_fill(~mask, -torch.inf)
    table = torch.cat([scores, given[3][:, None, None].expand(-1, length, 1)], -1).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", table[..., :-1], given[2])
    expected.backward(up)  # type: ignore[no-untyped-call]

    plain = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf)
    out, sums = flash.with_sinks(torch.einsum("hqk,khd->qhd", plain.softmax(-1), v), plain.logsumexp(-1), sinks)
    torch.testing.assert_close(out, expected.detach(), atol=1e-6, rtol=0)
    shares = (plain - sums[..., None]).exp()  # as the kernel's backward pass computes them
    rows = (up * out).sum(-1).t()
    of_scores = shares * (torch.einsum("qhd,khd->hqk", up, v) - rows[..., None])
    for x, grad in zip(given, (torch.einsum("hqk,khd->qhd", of_scores, k), torch.einsum("hqk,qhd->khd", of_scores, q)), strict=False):
        torch.testing.assert_close(grad, x.grad, atol=1e-6, rtol=0)
    torch.testing.assert_close(flash.of_sinks(up, out, sums, sinks), given[3].grad, atol=1e-6, rtol=0)
