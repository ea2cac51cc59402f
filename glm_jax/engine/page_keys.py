"""Names the content of a request's full pages: a chain of 128-bit hashes over its tokens."""

from hashlib import blake2b

import numpy as np
from jaxtyping import Int32

KEY_BYTES = 16


class PageKeys:
    """Keys of the full pages of one growing sequence of tokens.

    Page i's key hashes page i-1's key, the tokens of page i and, where a drafter keeps entries of
    its own in the pages, the token after it: the drafter's entry of a row is made of that row and
    the next token, so that of a page's last row depends on it. Every part of what is hashed carries
    a tag, so that no salt reads like a token.

    The hash is BLAKE2b, cut to 128 bits: collisions cannot be made on purpose.
    """

    __slots__ = ("_keys", "_root", "_with_next")

    def __init__(self, salt: str | None, *, with_next: bool) -> None:
        """Start a chain.

        Args:
            salt: Only sequences with the same salt share pages; None is a salt of its own.
            with_next: Whether a page's key depends on the token after it.
        """
        tag = b"plain" if salt is None else b"salt:" + salt.encode()
        self._root = blake2b(tag, digest_size=KEY_BYTES).digest()
        self._with_next = with_next
        self._keys: list[bytes] = []

    def upto(
        self, tokens: Int32[np.ndarray, " T"], page_size: int, most: int | None = None
    ) -> list[bytes]:
        """Return keys of the full pages; do not change the list.

        A key that depends on the token after its page is known once that token is.

        Args:
            tokens: All that are known; those of an earlier call may not have changed.
            page_size: Tokens per page.
            most: Make no more keys than this many in all; the list may be longer already.
        """
        keys = self._keys
        known = (len(tokens) - self._with_next) // page_size
        for page in range(len(keys), known if most is None else min(known, most)):
            start, stop = page * page_size, (page + 1) * page_size
            hashed = blake2b(keys[-1] if keys else self._root, digest_size=KEY_BYTES)
            hashed.update(b"tokens:" + tokens[start:stop].tobytes())
            if self._with_next:
                hashed.update(b"next:" + tokens[stop : stop + 1].tobytes())
            keys.append(hashed.digest())
        return keys
