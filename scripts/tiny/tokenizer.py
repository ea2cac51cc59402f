"""The byte-level BPE of the embedded model and its chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    END_OF_TURN,
    "<|tool|>",
    "<think>",
    "</think>",
)
PAD_ID = 0
EOS_IDS = (0, SPECIAL_TOKENS.index(END_OF_TURN))

# Turns are written as <|role|>text<|end|> and a line break; a reply is opened by its role token.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant", "tool") -%}
{{ raise_exception("unknown role: " ~ message.role) }}
{%- endif -%}
{{ "<|" ~ message.role ~ "|>" ~ message.content ~ "<|end|>\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|assistant|>" }}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Int[np.ndarray, " n"]]:
    """Encode texts, each opened by the end-of-text token."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([PAD_ID, *part.ids], np.int32) for part in encoded]


def format_turn(role: str, content: str) -> str:
    """Write one message as the chat template does."""
    return f"<|{role}|>{content}{END_OF_TURN}\n"


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def load_or_train_tokenizer(path: Path, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Read the tokenizer at `path`, or train it and write it there."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save(str(path))
    return tokenizer
