"""What parameters need of a tokenizer."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Encoder(Protocol):
    """Text to token ids; ``glm_jax.tokenizer.Tokenizer`` is one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of one token; None where there is no such token."""
        ...
