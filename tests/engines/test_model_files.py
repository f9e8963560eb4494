"""A model folder that cannot be loaded is refused at the launch, with the file's name, in seconds and without a network."""

import json
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph import notices
from rlgraph.engines.hf.model_files import check_loadable, header_shapes, text_config
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.errors import DataError


def length(response: str) -> float:
    return float(len(response))


def launch(path: str | Path) -> None:
    generator = rg.Generator(str(path), pool=rg.Pool("rollout"), engine="transformers", max_context=64, sampling=rg.Sampling(max_tokens=4))
    policy = rg.Policy(str(path), pool=rg.Pool("train"))
    rg.compile(
        grpo_graph(generator, policy, [{"prompt": "1 + 1 =", "answer": "2"}], name="model", reward=length, count=1), rg.Cluster(cpus=2)
    ).launch()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise AssertionError(f"the network was asked for {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("path", ["no-such-organisation/no-such-model", "/nowhere/model", "model.safetensors"])
@pytest.mark.usefixtures("no_network")
def test_a_folder_that_is_not_there_is_one_error_without_a_network(path: str) -> None:
    since = time.monotonic()
    with pytest.raises(DataError, match=f"model '{path}': no such folder[;,]") as raised:
        launch(path)
    assert time.monotonic() - since < 120  # imports on a busy machine
    assert ("hf download" in str(raised.value)) == path.startswith("no-such")


def config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def written(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}, folder / "model.safetensors")


def with_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


WRONG_SIZE = header(json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()) + bytes(4)
INDEX = json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}).encode()

BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "config cut off": (written("config.json", b'{"model_type": "ll'), r"config\.json' is not JSON"),
    "config is a list": (written("config.json", b"[]"), r"config\.json' holds a list"),
    "config is bytes": (written("config.json", b"\xff\xfe\x00"), r"config\.json' is not JSON"),
    "unknown architecture": (config(model_type="llama9"), r"config\.json': model_type 'llama9' is unknown to transformers"),
    "encoder and decoder": (config(is_encoder_decoder=True), r"config\.json': an encoder with a decoder"),
    "size as text": (config(hidden_size="64"), r"config\.json': hidden_size is '64'"),
    "other width": (config(hidden_size=128), r"model\.safetensors': 'model\.\S+' has the shape .* but by config\.json it is"),
    "other vocabulary": (config(vocab_size=300), r"'model\.embed_tokens\.weight' has the shape \[288, 64\], .* \[300, 64\]"),
    "other heads": (config(num_key_value_heads=2), r"k_proj\.weight' has the shape"),
    "more layers": (config(num_hidden_layers=3), r"has 3 layers, but the weights of layers \[2\] are in no"),
    "fewer layers": (config(num_hidden_layers=1), r"has 1 layers, the weights have 2"),
    "a layer is missing": (without_layer, r"the weights of layers \[1\] are in no"),
    "weights cut off": (cut_off, r"model\.safetensors' has \d+ bytes, but by its header \d+: it was cut off"),
    "weights are empty": (written("model.safetensors", b""), r"model\.safetensors' has 0 bytes and is not in safetensors format"),
    "weights are a pointer": (written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "weights are a page": (
        written("model.safetensors", b"<!doctype html><p>not found</p>"),
        r"model\.safetensors' .* is not in safetensors format",
    ),
    "header is no JSON": (written("model.safetensors", header(b"{broken")), r"model\.safetensors': its header is broken"),
    "header of no tensor": (written("model.safetensors", header(b"{}")), "hold no tensor"),
    "header of another size": (written("model.safetensors", WRONG_SIZE), r"a tensor of shape \[2\] and F32 has 4 bytes"),
    "a file of the index is missing": (written("model.safetensors.index.json", INDEX), r"index\.json': there is no 'model-00002-of-00002"),
    "index is no JSON": (written("model.safetensors.index.json", b"x"), r"index\.json' is not an index of weights"),
    "a head beside the tied one": (with_head, r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight', but config\.json ties them"),
    "no tokenizer": (without_tokenizer, "no tokenizer among its files"),
    "tokenizer cut off": (written("tokenizer.json", b'{"version": "1.0", "mod'), r"tokenizer\.json' is not JSON"),
    "tokenizer of nothing": (written("tokenizer.json", b"{}"), r"tokenizer\.json': the tokenizer cannot be loaded"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.usefixtures("no_network")
def test_a_broken_model_is_refused_at_the_launch_with_its_file(tied: Path, tmp_path: Path, name: str) -> None:
    spoil, message = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(tied, folder)
    spoil(folder)
    with pytest.raises(DataError, match=message) as raised:
        launch(folder)
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 600


def test_models_of_every_shape_in_the_tests_can_be_loaded(tied: Path, untied: Path) -> None:
    for folder in (tied, untied):
        assert check_model(folder, loadable=True) == check_model(folder)
        assert header_shapes(folder / "model.safetensors")["model.embed_tokens.weight"] == (288, 64)


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Mistral", "Gemma2", "Olmo2", "Granite", "SmolLM3", "Phi3", "Mixtral", "GPTNeoX"])
def test_what_transformers_writes_of_other_families_is_taken(tmp_path: Path, kind: str) -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "head_dim": 16}
    sizes |= {"num_local_experts": 2, "pad_token_id": 0, "max_position_embeddings": 64}
    if kind not in ("GPTNeoX", "Olmo2", "SmolLM3", "Granite"):
        sizes |= {"num_key_value_heads": 2}
    made = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(tmp_path)
    check_loadable(tmp_path, json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("family", ["AyaVision", "Cohere2Vision"])
def test_a_class_of_transformers_that_leaves_the_scale_of_logits_out_is_named(family: str, tmp_path: Path) -> None:
    import transformers

    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path)
    text_config(tmp_path)
    assert any("logit_scale=0.0625" in said and str(tmp_path) in said for said in notices.here.list_all())
