"""A small vision model with random weights: Idefics3, as in SmolVLM, which needs no torchvision.

Its tokenizer has a token for each byte, and its weights are large, so that texts behind different
pictures differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

MARK = "<image>"
_MARKS = (
    "<s>",
    "</s>",
    "<pad>",
    MARK,
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
_SIDE, _SQUARE, _SCALE = 56, 14, 2
ROWS = 3 + (_SIDE // _SQUARE // _SCALE) ** 2
"""Rows of a picture: four, and three tokens around them."""
_TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}"
)


def write_idefics(folder: Path) -> Path:
    """Write the model with its tokenizer and processor to ``folder``, and return it."""
    tokenizer = byte_tokenizer()
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": _SQUARE,
        "initializer_range": 0.3,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.to_dict(),
        image_token_id=tokenizer.get_vocab()[MARK],
        scale_factor=_SCALE,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).eval().save_pretrained(folder)
    # The class without torchvision has a name of its own in transformers 5.
    kind = getattr(transformers, "Idefics3ImageProcessorPil", transformers.Idefics3ImageProcessor)
    pictures = kind(
        size={"longest_edge": _SIDE},
        max_image_size={"longest_edge": _SIDE},
        do_image_splitting=False,
    )
    side = _SIDE // _SQUARE // _SCALE
    Idefics3Processor(
        image_processor=pictures, tokenizer=tokenizer, image_seq_len=side * side
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(one, special=True, normalized=False) for one in _MARKS]
    tokenizer.add_special_tokens(marks)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = _TEMPLATE
    return fast
