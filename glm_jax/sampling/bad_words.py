"""Words that the output must not complete; host-only."""

from collections.abc import Iterable, Sequence

from glm_jax.sampling.encoder import Encoder

Word = tuple[int, ...]


def word_tokens(
    words: Iterable[str | Sequence[int]], tokenizer: Encoder | None
) -> tuple[Word, ...]:
    """Return each word as token ids, a string at the start of a text and behind a space.

    As in vLLM, the form behind a space counts only where it differs in its first token and has as
    many tokens: otherwise the space is a token of its own, and the first form matches behind it.

    Raises:
        ValueError: a string without a tokenizer.
    """
    found: dict[Word, None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise ValueError(
                f"bad_words holds the string {word!r}, but the engine has no tokenizer "
                "(skip_tokenizer_init). Pass the token ids of the word."
            )
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    return tuple(found)


class LongWords:
    """The words of more than one token.

    As in vLLM all tokens of a word must be output: a prompt that ends in the middle of one is no
    reason to ban its end.
    """

    def __init__(self, words: Iterable[Word]) -> None:
        """Sort the words by the token before their last one."""
        self._ends: dict[int, list[Word]] = {}
        for word in words:
            self._ends.setdefault(word[-2], []).append(word)
        self.longest = max((len(word) for ends in self._ends.values() for word in ends), default=0)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._ends)

    def banned_after(self, output: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that would complete a word.

        Args:
            output: at least the last ``longest - 1`` output tokens, or all there are.
        """
        if not output:
            return ()
        found: dict[int, None] = {}
        for word in self._ends.get(output[-1], ()):
            if tuple(output[1 - len(word) :]) == word[:-1]:
                found[word[-1]] = None
        return tuple(found)

    def possible_bans(self) -> Iterable[tuple[int, ...]]:
        """Yield every largest set of tokens that can be banned at once.

        What matches at a token all matches the end of the longest match, so the output that ends
        with the beginning of a word bans as much as any that matches it.
        """
        for ends in self._ends.values():
            for word in ends:
                yield self.banned_after(word[:-1])
