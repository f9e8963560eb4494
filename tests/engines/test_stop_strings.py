"""A response ends with the token that completes a stop string: the first after which its whole text has the string in it."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import rlgraph as rg
from rlgraph.engines.stop_strings import StopStrings
from rlgraph.engines.vllm.engine import _Running
from rlgraph.errors import GraphError

# Pieces of stop strings, of characters of several bytes, and what tokens have around them.
OF_BYTES = ["<", "/", "a", ">", "</", "a>", "/a", "> b", "x</a", ">>", "b", "Ġ", "Ċ", "Ã", "©", "ÃŁ", "ĠaĊ", "Ġ<"]
OF_WORDS = ["<", "/", "a", ">", "</", "a>", "▁", "▁a", "▁<", "b", "▁b", ">▁", "<0xC3>", "<0xA9>", "é", "é>", "</a"]


def tokenizer_of(words: list[str], decoder: Any) -> Any:
    vocab = {word: place for place, word in enumerate(["<|end|>", *words])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


TOKENIZERS = {
    "of bytes": tokenizer_of(OF_BYTES, decoders.ByteLevel()),
    "of words": tokenizer_of(OF_WORDS, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
}


@pytest.mark.parametrize("texts", [("</a>",), (" a",), ("a b", "é>"), ("> ",), ("é",), ("<|end|>", "never")], ids=str)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_string_ends_where_the_whole_text_has_it_first(name: str, texts: tuple[str, ...]) -> None:
    tokenizer, draw, ended = TOKENIZERS[name], random.Random(0), 0
    stops = StopStrings(tokenizer, texts)
    for _ in range(400):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 30))]
        whole = [tokenizer.decode(tokens[:end]) for end in range(len(tokens) + 1)]
        expected = next((end for end, text in enumerate(whole) if any(each in text for each in texts)), None)
        found = [end for end in range(1, len(tokens) + 1) if stops.find_end(tokens[:end], end - 1) == end]
        assert min(found, default=None) == expected, tokenizer.convert_ids_to_tokens(tokens)
        assert stops.find_end(tokens, 0) == expected, "of several tokens of a step"
        ended += expected is not None
    assert ended


def test_tokens_after_a_stop_string_are_cut_off_with_their_log_probs() -> None:
    """Several guessed tokens may come per step."""
    row = _Running(None, StopStrings(TOKENIZERS["of bytes"], ("/a",)), [3, 3], [-1.0, -1.0])  # type: ignore[arg-type]
    row.tokens += [1, 7, 4, 4]
    row.log_probs += [-2.0, -3.0, -4.0, -5.0]
    assert row.cut_at_text(4)
    assert (row.tokens, row.log_probs) == ([3, 3, 1, 7], [-1.0, -1.0, -2.0, -3.0])
    assert not row.cut_at_text(0)


@pytest.mark.parametrize("setting", [{"min_p": 0.1}, {"stop": ("</a>",)}])
def test_an_engine_that_has_no_such_setting_refuses_it_where_it_is_declared(setting: dict[str, Any]) -> None:
    from rlgraph.extend import EngineSpec

    sampling, pool = rg.Sampling(**setting), rg.Pool("p")
    own = EngineSpec(name="mine", load=lambda generator, place: None)  # type: ignore[arg-type,return-value]
    refused = rf"Sampling\({next(iter(setting))}=.*: the engine 'mine' has no such setting; .* use engine='vllm' or"
    with pytest.raises(GraphError, match=refused):
        rg.Generator("m", pool=pool, engine=own, sampling=sampling)
    generator, questions = rg.Generator("m", pool=pool, engine=own), [{"prompt": "?", "answer": "4"}]
    with pytest.raises(GraphError, match=refused):
        generator.rollout(rg.prompts(questions, 1), sampling=sampling)
    with pytest.raises(GraphError, match=refused):
        rg.evaluate(generator, questions, None, reward=lambda response: 1.0, every=1, sampling=sampling)


def test_drafts_are_not_sampled_with_min_p() -> None:
    with pytest.raises(GraphError, match="engines with drafts sample by temperature, top_k and top_p; leave out min_p, or drafts"):
        rg.Generator("m", pool=rg.Pool("p"), drafts=rg.options.PromptLookup(), sampling=rg.Sampling(min_p=0.1))
