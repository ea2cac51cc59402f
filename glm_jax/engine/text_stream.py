"""Text of one request as it grows: detokenised token by token, cut at stop strings."""

from collections.abc import Sequence

from glm_jax.sampling.params import SamplingParams
from glm_jax.stop_strings import StopStrings
from glm_jax.tokenizer import Tokenizer


class TextStream:
    """Turns kept tokens into visible text.

    The token that ends a request (EOS or a stop token) is not part of the text unless
    ``include_stop_str_in_output``. Stop strings are looked for from ``min_tokens`` on.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = tokenizer.incremental_decoder(
            skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._searches = bool(params.stop)
        self._include_end = params.include_stop_str_in_output
        self._free_tokens = params.min_tokens
        self._seen = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything visible so far."""
        return "".join(self._pieces)

    @property
    def matched(self) -> str | None:
        """The stop string that was completed."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int], *, ended: bool) -> tuple[str, int]:
        """Take the tokens a step kept.

        Args:
            token_ids: the tokens in order.
            ended: the last of them is EOS or a stop token.

        Returns:
            The newly visible text, and how many of the tokens remain: fewer than given when a
            stop string was completed before the last.
        """
        if not self._searches:
            shown = token_ids[:-1] if ended and not self._include_end else token_ids
            return self._keep([self._decoder.push(shown)]), len(token_ids)
        added = []
        for index, token in enumerate(token_ids):
            self._seen += 1
            hidden = ended and index == len(token_ids) - 1 and not self._include_end
            piece = "" if hidden else self._decoder.push([token])
            checked = self._seen > self._free_tokens
            added.append(self._stops.push(piece) if checked else piece)
            if self._stops.matched is not None:
                return self._keep(added), index + 1
        return self._keep(added), len(token_ids)

    def finish(self) -> str:
        """End the text: give out what was held back."""
        rest = self._stops.push(self._decoder.finish())
        return self._keep([rest + self._stops.finish()])

    def _keep(self, pieces: list[str]) -> str:
        text = "".join(pieces)
        if text:
            self._pieces.append(text)
        return text
