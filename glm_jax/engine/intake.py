"""Makes the requests that a user's request is served by, or refuses it with the reason."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from glm_jax.engine.children import Child, children_of
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.live_request import LiveRequest
from glm_jax.engine.prompt import prompt_tokens
from glm_jax.engine.request import Request
from glm_jax.engine.request_logprobs import RequestLogprobs, check_logprobs, of_anything
from glm_jax.engine.text_stream import TextStream
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.request_controls import controls_of
from glm_jax.sampling.thinking import thinking_ids
from glm_jax.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user asks of the engine.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt: Text, or token ids.
        params: What to generate.
        keep_logits: Collect the logits of all prompt rows.
        priority: Lower is served first, with scheduling_policy "priority".
        deadline: Time by the engine's clock at which it is ended; None is never.
        cache_salt: It shares pages only with requests of the same salt.
    """

    request_id: str
    prompt: str | Sequence[int]
    params: SamplingParams
    keep_logits: bool = False
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None


class Intake:
    """Turns what users ask for into requests."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Take what a request is checked against.

        Args:
            config: The engine's options.
            vocab_size: Token ids below it are valid.
            eos_token_ids: The model's end tokens.
            tokenizer: None works on token ids only.
        """
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._think_ids = thinking_ids(tokenizer)

    def requests(self, ask: Ask) -> list[LiveRequest]:
        """Return one request per completion.

        Raises:
            ValueError: The prompt, a parameter or an option of the request is not possible here.
        """
        params = ask.params
        check_logprobs(params, self._config, self._vocab_size)
        text, token_ids = prompt_tokens(ask.prompt, self._tokenizer, self._vocab_size)
        if params.stop and self._tokenizer is None:
            raise ValueError(
                f"stop strings {params.stop} need text, but the engine has no tokenizer "
                "(skip_tokenizer_init). Use stop_token_ids."
            )
        children = children_of(ask.request_id, params)
        return [self._live(ask, child, text, token_ids) for child in children]

    def _live(
        self, ask: Ask, child: Child, text: str | None, token_ids: Sequence[int]
    ) -> LiveRequest:
        """Return a request with whatever it needs beside the scheduler's state."""
        params, tokenizer = child.params, self._tokenizer
        request = Request(
            child.request_id,
            token_ids,
            params,
            eos_token_ids=self._eos_token_ids,
            priority=ask.priority,
            deadline=ask.deadline,
            cache_salt=ask.cache_salt,
        )
        request.controls = controls_of(
            params,
            vocab_size=self._vocab_size,
            tokenizer=tokenizer,
            think_ids=self._think_ids,
            stop_ids=request.banned_ids() if params.min_tokens else (),
        )
        # Cached pages have no hidden rows.
        request.reads_prefix = not ask.keep_logits and params.prompt_logprobs is None
        stream = None
        if params.detokenize and tokenizer is not None:
            stream = TextStream(tokenizer, params)
        live = LiveRequest(request, text, stream, parent_id=child.parent_id, index=child.index)
        if ask.keep_logits:
            live.logits = np.zeros((len(token_ids), self._vocab_size), np.float32)
        if of_anything(params):
            decode = tokenizer.decode_one if stream and tokenizer else None
            live.logprobs = RequestLogprobs(request, decode)
        return live
