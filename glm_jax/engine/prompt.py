"""A prompt as a caller gives it, as token ids."""

from collections.abc import Sequence

from glm_jax.tokenizer import Tokenizer


def prompt_tokens(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[str | None, list[int]]:
    """Return the text, if it is one, and the token ids.

    Raises:
        ValueError: a text without a tokenizer, or a token id out of range.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer, but the engine has none "
                "(skip_tokenizer_init). Pass token ids."
            )
        return prompt, tokenizer.encode(prompt)
    token_ids = [int(token) for token in prompt]
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {token} is out of range; allowed: 0 to {vocab_size - 1}. "
                "Encode the prompt with this model's tokenizer."
            )
    return None, token_ids
