"""Tiny random models that read images, with their processors, and images for them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, SIDE, PATCH = 300, 28, 7
TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0}  # fmt: skip
TOWER = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDEFICS = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"]
QWEN = ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL = {  # the token of an image in a text, and the others of a family
    "gemma3": ("<start_of_image>", ["<image_soft_token>", "<end_of_image>"]),
    "idefics3": ("<image>", IDEFICS),
    "internvl": ("<IMG_CONTEXT>", ["<img>", "</img>", "<video>"]),
    "llava": ("<image>", []),
    "qwen2_5_vl": ("<|image_pad|>", QWEN),
    "qwen3_vl": ("<|image_pad|>", QWEN),
    "smolvlm": ("<image>", [*IDEFICS, "<video>"]),
}
QWEN_KINDS = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
TOWERS = ("visual", "vision", "connector", "projector")  # in the names of parameters that are not of the language model
KINDS = tuple(SPECIAL)
COUNTED = {"internvl": "image_seq_length", "smolvlm": "image_seq_len"}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ PLACE if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def folder_of(kind: str, folder: Path) -> Path:
    """Write a tiny random model of a family that reads images, its tokenizer, chat template and processor."""
    from transformers import AutoModelForImageTextToText

    from rlgraph.engines.hf.pretrained import quiet

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer(kind)
        config = _config(kind, tokenizer)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else torch.nn.init.normal_(parameter, 1.0, 0.1)
        model.save_pretrained(folder)
        for part in _processors(kind, tokenizer):
            part.save_pretrained(folder)
        if kind in COUNTED:
            (folder / "processor_config.json").write_text(json.dumps({COUNTED[kind]: 4}))
    return folder


def _tokenizer(kind: str) -> Any:
    from rlgraph.engines.hf.pretrained import byte_tokenizer

    made, (image, more) = byte_tokenizer(), SPECIAL[kind]
    made.add_special_tokens({"additional_special_tokens": [image, *more]})
    made.chat_template = TEMPLATE.replace("PLACE", repr(image))
    if kind == "gemma3":
        made.add_tokens(["\n" * count for count in range(1, 6)])  # as published ones have them, up to 31
        made._set_model_specific_special_tokens({"boi_token": image, "image_token": more[0], "eoi_token": more[1]})
    if kind == "internvl":
        named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": image, "video_token": "<video>"}
        made._set_model_specific_special_tokens(special_tokens=named)
    return made


def _processors(kind: str, tokenizer: Any) -> list[Any]:
    """The processor of a family; the parts of one that has a part for videos, which needs torchvision."""
    import transformers

    size = {"height": SIDE, "width": SIDE}
    if kind == "llava":
        images = transformers.CLIPImageProcessorPil(size=size, crop_size=size)
        return [transformers.LlavaProcessor(images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
                                           num_additional_image_tokens=1)]  # fmt: skip
    if kind == "gemma3":
        return [transformers.Gemma3Processor(transformers.Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=4)]
    if kind == "idefics3":
        edge = {"longest_edge": SIDE}
        images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge)
        return [transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)]
    if kind == "smolvlm":
        edge = {"longest_edge": SIDE}
        return [transformers.SmolVLMImageProcessorPil(size=edge, max_image_size=edge), tokenizer]
    if kind == "internvl":
        return [transformers.GotOcr2ImageProcessorPil(size=size, crop_to_patches=False), tokenizer]
    pixels = {"min_pixels": SIDE * SIDE, "max_pixels": 4 * SIDE * SIDE}
    return [transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, **pixels), tokenizer]


def _config(kind: str, tokenizer: Any) -> Any:
    import transformers

    token, tower, text = tokenizer.convert_tokens_to_ids(SPECIAL[kind][0]), {**TOWER, "image_size": SIDE, "patch_size": PATCH}, TEXT
    if kind == "gemma3":
        kinds = ["full_attention", "sliding_attention", "full_attention"]  # what the last layer makes of an image nothing reads
        layers = {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 6}
        text = {**text, **layers, "head_dim": 32, "query_pre_attn_scalar": 32}
        tower |= {"vision_use_head": False}
        return transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, tie_word_embeddings=False,
                                         image_token_id=tokenizer.image_token_id)  # fmt: skip
    if kind == "llava":
        return transformers.LlavaConfig(text_config=transformers.LlamaConfig(**text),
                                        vision_config=transformers.CLIPVisionConfig(**tower), image_token_id=token)  # fmt: skip
    if kind in ("idefics3", "smolvlm"):
        family = transformers.Idefics3Config if kind == "idefics3" else transformers.SmolVLMConfig
        return family(text_config=transformers.LlamaConfig(**text), vision_config=tower, image_token_id=token,
                                           scale_factor=2, pad_token_id=0)  # fmt: skip
    if kind == "internvl":
        tower |= {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
        return transformers.InternVLConfig(text_config=transformers.Qwen2Config(**text), vision_config=tower, image_token_id=token,
                                           image_seq_length=4, downsample_ratio=0.5)  # fmt: skip
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 64}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": kind == "qwen3_vl"}
    text = {**text, "head_dim": 32, "rope_parameters": rotary}
    if kind == "qwen2_5_vl":
        tower |= {"window_size": 2 * SIDE, "fullatt_block_indexes": [1]}
        del text["head_dim"]
    else:
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    names = {"video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    more = {name: tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
    family = getattr(transformers, f"{QWEN_KINDS[kind]}Config")
    return family(text_config=text, vision_config=tower, image_token_id=token, tie_word_embeddings=kind == "qwen3_vl", **more)


def picture(seed: int, width: int = 40, height: int = 24) -> str:
    """Draw random pixels, as a data URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def row(*seeds: int) -> str:
    """The images of a row, as the column has them."""
    return json.dumps([picture(seed) for seed in seeds])


def requests(folder: Path, kind: str) -> tuple[list[list[int]], list[Any]]:
    """Make five prompts: with one image, the same text with another image, two images, none, and a conversation before its second turn.

    Returns their tokens and images. In the conversation text is followed by a turn with the token of an image, which is of none, and then
    two images of a tool.
    """
    from rlgraph.engines.api import Images
    from rlgraph.engines.hf.images import expand_images, processor_of

    mark, tokenizer = SPECIAL[kind][0], processor_of(str(folder)).tokenizer
    texts = [f"user: {mark}hi", f"user: {mark}hi", f"user: {mark}a\n{mark}b", "none", f"tool: {mark}and{mark}ok"]
    urls = [row(1), row(4), row(2, 3), row(), row(5, 6)]
    rows = [
        expand_images(folder, tokenizer(text, add_special_tokens=False)["input_ids"], own) for text, own in zip(texts, urls, strict=True)
    ]
    begun = [*BEGUN[0], 40, token_of(folder), 41]
    tokens, places = rows[4]
    rows[4] = [*begun, *tokens], [(begin + len(begun), end + len(begun)) for begin, end in places]
    return [tokens for tokens, _ in rows], [Images(own, at) if at else None for own, (_, at) in zip(urls, rows, strict=True)]


BEGUN = [*range(50, 130)], 3  # the prompt of the conversation, long enough to be shared, and the number of tokens of its first turn


def rollout_of(folder: Path, kind: str, responses: list[Any]) -> dict[str, Any]:
    """Make the batch of responses to `requests`, equally many to each. The mask is false on the first turn of a conversation."""
    from rlgraph.engines.api import Images, Response
    from rlgraph.nodes.rollout.decode_loop import Outcome, image_columns, pack_outcomes

    group, rows = len(responses) // 5, list[Outcome]()
    prompts, shown = ([each for each in column for _ in range(group)] for column in requests(folder, kind))
    for number, (prompt, response, images) in enumerate(zip(prompts, responses, shown, strict=True)):
        begun = len(BEGUN[0]) if number >= 4 * group else len(prompt)
        read = prompt[begun:]
        whole = Response([*read, *response.tokens], [0.0] * len(read) + response.log_probs, [0] * (len(read) + len(response.tokens)))
        written = [False] * len(read) + [True] * len(response.tokens)
        rows.append(Outcome(prompt[:begun], whole, written, images=images or Images("[]", ())))
    batch = pack_outcomes(rows, torch.arange(len(rows)) // group)
    return batch | image_columns(rows, batch["responses"])


def batch_of(folder: Path, kind: str, *, seed: int = 1) -> dict[str, Any]:
    """Make two responses to each of `requests`.

    The third response has the token of an image, which is of none. What is learnt of the last one ends before its second image.
    """
    from rlgraph.engines.api import Response

    numbers = torch.Generator().manual_seed(seed)
    responses = [torch.randint(1, 250, (length,), generator=numbers).tolist() for length in (3, 8, 5, 2, 6, 7, 1, 4, 5, 3)]
    responses[2][1] = token_of(folder)
    batch = rollout_of(folder, kind, [Response(tokens, [0.0] * len(tokens)) for tokens in responses])
    second = requests(folder, kind)[1][4].places[1][0] - len(BEGUN[0])
    batch["response_mask"][8:, : BEGUN[1]] = True
    batch["response_mask"][9, second - 1 :] = torch.arange(batch["responses"].shape[1] - second + 1) == 0
    return {**batch, "advantages": torch.randn(batch["responses"].shape, generator=numbers)}


def token_of(folder: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).image_token_id)


def direct_log_probs(net: Any, folder: Path, batch: dict[str, Any]) -> torch.Tensor:
    """Compute the log-probs `[B, T]` of the responses by the model's own forward, one row after another.

    The token of an image that the model wrote is of none: it is embedded, and not counted.
    """
    from rlgraph.engines.hf.images import TEXT as READ
    from rlgraph.engines.hf.images import processor_of, read_images

    processor, found = processor_of(str(folder)), []
    for prompt, prompt_mask, response, mask, urls, shown in zip(
        *(batch[name] for name in ("prompts", "prompt_mask", "responses", "response_mask", "images", "image_mask")), strict=True
    ):
        read, images = prompt[prompt_mask], read_images(urls)
        given = processor(text=[processor.image_token * len(images)], images=[images], return_tensors="pt") if images else {}
        pixels = {name: value for name, value in given.items() if name not in READ}
        tokens = torch.cat([read, response])
        own = tokens == token_of(folder)
        own[len(read) :] &= shown
        if images and hasattr(net.model, "get_rope_index"):  # which shows by the type of a token where an image is
            counted = torch.where(own | (tokens != token_of(folder)), tokens, 1)
            hook = net.get_input_embeddings().register_forward_pre_hook(lambda module, given, all=tokens: (all[None],))
            logits = net(input_ids=counted[None], mm_token_type_ids=own[None].int(), **pixels).logits[0, len(read) - 1 : -1]
            hook.remove()
        else:
            embedded = net.get_input_embeddings()(tokens)
            if images:
                found_in = net.model.get_image_features(**pixels).pooler_output
                features = found_in if isinstance(found_in, torch.Tensor) else torch.cat(list(found_in))
                embedded = embedded.clone()
                embedded[own] = features.flatten(0, -2)
            both_ways = {"token_type_ids": own[None].long()} if net.config.model_type == "gemma3" else {}
            logits = net(inputs_embeds=embedded[None], **both_ways).logits[0, len(read) - 1 : -1]
        scores = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        found.append(torch.where(mask, scores, 0.0))
    return torch.stack(found)
