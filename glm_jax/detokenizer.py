"""Turns token ids into text as they arrive; used by the engine's streams, made by Tokenizer."""

import codecs
from collections.abc import Callable, Iterable


class IncrementalDecoder:
    """Streaming detokenisation of one request.

    A byte-level BPE token is a string of bytes, and a character may be spread over several tokens,
    so bytes go through an incremental UTF-8 decoder that holds back an unfinished character. Work
    per token is proportional to its bytes, however long the text is. Bytes that can no longer
    become a character are given out as U+FFFD at once, so the concatenation of everything given
    out equals decoding all the tokens together.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]):
        """Start an empty text.

        Args:
            token_bytes: bytes of a token id; empty for tokens that have no text.
        """
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that they complete."""
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """End the text: return a held-back unfinished character as U+FFFD, or nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
