"""Pictures to count in: some cells of a grid are filled. And a small model with random weights that can read them."""

import io
import random
from pathlib import Path
from typing import Any

import torch

SIDE, CELLS, MOST = 32, 4, 8  # pixels, cells in a row, filled cells
TEMPLATE = """\
{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"""


def pictures(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw pictures as PNG files in memory, with the question how many cells are filled, and the answer."""
    draw = random.Random(seed)
    return [_picture(draw, draw.randint(1, MOST)) for _ in range(count)]


def _picture(draw: random.Random, filled: int) -> dict[str, Any]:
    from PIL import Image, ImageDraw

    image, size = Image.new("RGB", (SIDE, SIDE), "white"), SIDE // CELLS
    for cell in draw.sample(range(CELLS * CELLS), filled):
        left, top = size * (cell % CELLS), size * (cell // CELLS)
        color = tuple(draw.randint(0, 120) for _ in range(3))
        ImageDraw.Draw(image).rectangle((left + 1, top + 1, left + size - 2, top + size - 2), fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"prompt": "<image>How many?", "images": [file.getvalue()], "answer": str(filled)}


def right_count(response: str, answer: str) -> float:
    """1 for the right number and nothing else."""
    return float(response.strip() == answer)


def small_model(folder: Path) -> Path:
    """Write a LLaVA of a million random weights: each cell of a picture is a token of it. A folder that exists stays as it is."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if folder.exists():
        return folder
    letters = {token: number for number, token in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    table = Tokenizer(models.BPE(vocab=letters, merges=[]))
    table.pre_tokenizer, table.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "pad_token": "<|end|>", "additional_special_tokens": ["<image>"]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=table, chat_template=TEMPLATE, **special)
    size, patch = {"height": SIDE, "width": SIDE}, SIDE // CELLS
    tower = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=SIDE, patch_size=patch
    )
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
    )
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(text_config=text, vision_config=tower, image_token_id=token, vision_feature_layer=-1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "language_model" not in name:  # the tower stays as it is drawn: features of the size of embeddings
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    images = transformers.CLIPImageProcessorPil(size=size, crop_size=size)
    marks = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}  # the tower's first token is not an image's
    transformers.LlavaProcessor(images, tokenizer, patch_size=patch, **marks).save_pretrained(folder)
    return folder
