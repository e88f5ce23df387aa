"""Byte-level BPE tokenizer of the bundled pair, and the corpus as one array of token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_pair.corpus import ASSISTANT, END, USER, Document

VOCABULARY_SIZE = 4096
SPECIAL_TOKENS = [END, USER, ASSISTANT]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|endoftext|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(documents: list[Document], folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((d.text for d in documents if not d.held_out), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": END,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def token_ids(documents: list[Document], tokenizer: Tokenizer, held_out: bool) -> np.ndarray:
    """Ids of all documents of one side of the split, END between documents; uint16, shape [N]."""
    texts = [d.text for d in documents if d.held_out == held_out]
    end = tokenizer.token_to_id(END)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)
