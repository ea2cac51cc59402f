"""Text to token ids and back, from a checkpoint's tokenizer.json; no JAX."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from glm_jax.chat_template import ChatTemplate, ChatTemplateError, read_json, token_text
from glm_jax.detokenizer import IncrementalDecoder


class Tokenizer:
    """A byte-level BPE with its end-of-text ids and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ):
        """Wrap a `tokenizers` tokenizer.

        Raises:
            ValueError: its decoder is not byte-level, so a token is not a string of bytes.
        """
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(
                f"the tokenizer's decoder is {backend.decoder}, which glm-jax cannot stream; "
                "it reads byte-level BPE (decoder ByteLevel), the form of every GLM-5 checkpoint"
            )
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self._special_ids = frozenset(
            id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special
        )
        # Bytes of the tokens met so far: converting the whole vocabulary takes a second at start.
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_path(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json and its companions from a checkpoint folder.

        Raises:
            FileNotFoundError: the folder has no tokenizer.json.
            ValueError: the file is not a tokenizer, or not a byte-level one.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(
                f"{file} does not exist; without it only token ids can be used "
                "(skip_tokenizer_init=True)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # `tokenizers` raises bare Exception for a malformed file
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        return cls(
            backend,
            eos_token_ids=_read_eos_token_ids(folder, backend),
            chat_template=ChatTemplate.from_path(folder),
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; a model's vocabulary may be padded beyond."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: special tokens written out in it are recognised.
            add_special_tokens: also add what the tokenizer puts around a plain text; leave it off
                for a rendered chat template, which has written everything out.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def token_id(self, token: str) -> int | None:
        """Return the id of one token, such as "</think>"; None where there is no such token."""
        return self._backend.token_to_id(token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """Return a streaming decoder whose pieces add up to what `decode` returns."""
        return IncrementalDecoder(self._text_bytes if skip_special_tokens else self.token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; nothing for an id that only pads the model's vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _to_bytes(self._backend.id_to_token(token_id) or "")
        return found

    def decode_one(self, token_id: int) -> str:
        """Return the text of one token by itself; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return a conversation as text; see `ChatTemplate.render` for the variables.

        Raises:
            ChatTemplateError: the checkpoint has no chat template, or it refused the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); render the conversation yourself and pass text"
            )
        return self.chat_template.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the token ids of a rendered conversation."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)


def _read_eos_token_ids(folder: Path, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a generation: generation_config.json's first, as it is the newest."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    token_id = backend.token_to_id(token_text(token)) if token else None
    return () if token_id is None else (token_id,)


def _byte_alphabet() -> dict[str, int]:
    """Return the printable stand-ins of byte-level BPE: character -> byte.

    Printable Latin-1 bytes stand for themselves; the 68 others are written as the characters from
    U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + index): byte for index, byte in enumerate(others)},
    }


_ALPHABET = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        # An added token may hold characters outside the alphabet (a space): it is plain text.
        return token.encode()
