"""A whole Engine without JAX: FakeDevice as its executor, a tokenizer of one character a token."""

from collections.abc import Sequence

import numpy as np
import tokenizers
from engine.fake_loop import run_loop
from engine.fake_program import VOCABULARY, FakeDevice, tokens_alone
from tokenizers import decoders, models

from bucketing.grid import Cell
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.engine import Engine
from glm_jax.engine.modes import Served, full
from glm_jax.engine.outputs import RequestOutput, StreamDelta
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.row_logprobs import RowLogprobs, RowQuestion
from glm_jax.tokenizer import Tokenizer

# The text of each token, and how a byte-level vocabulary writes it.
CHARACTERS = [*map(chr, range(0x21, 0x7F)), " ", "\n", "\t"]
SPELLINGS = [*map(chr, range(0x21, 0x7F)), "\u0120", "\u010a", "\u0109"]
OPTIONS = {
    "max_model_len": 48,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 8,
    "page_size": 4,
    "prefill_buckets": (4,),
    "group_buckets": (1,),
}


def logprob_of(hidden: int, token: int) -> float:
    """A number that no other row and token has; float32 holds it exactly."""
    return -float(hidden * VOCABULARY + token) / 2**10


def top_ids_of(hidden: int) -> list[int]:
    """All tokens, the most likely first; different in every row."""
    return [(hidden + n) % VOCABULARY for n in range(VOCABULARY)]


def rank_of(hidden: int, token: int) -> int:
    return (token - hidden) % VOCABULARY + 1


class FakeExecutor:
    """Runs steps on a FakeDevice; a reset loses everything, as a new cache does.

    Attributes:
        resets: How often the device was made anew.
    """

    drafts_write_ahead = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.resets = -1
        self.reset()

    def serve(self, cell: Cell, rows: int, loop_steps: int = 1) -> Served:
        return full(cell)._replace(loop=loop_steps > 1)

    def control(self, updates) -> None:
        for update in updates:
            self.device.controls.update(update)

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        return self.device.run(served.layout, inputs)

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        return run_loop(self.device, served.layout, inputs, ends)

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> np.ndarray:
        """One-hot at the row's number, so that a test sees which rows were asked for."""
        return np.eye(VOCABULARY, dtype=np.float32)[np.array(rows)]

    def logprobs(self, outputs: StepOutputs, question: RowQuestion) -> RowLogprobs:
        """Values that tell the position and the token of the row asked, and the id asked about."""
        rows, targets, further = question
        most = min(self.config.max_logprobs, VOCABULARY)
        seen = [int(value) for value in np.asarray(outputs.hidden)[0, np.array(rows), 0]]
        best = [top_ids_of(value)[:most] for value in seen]
        more = np.zeros((len(rows), most), np.float32)
        for row, ids in enumerate(further):
            more[row, : len(ids)] = [logprob_of(seen[row], id_) for id_ in ids]
        pairs = list(zip(seen, targets, strict=True))
        return RowLogprobs(
            np.array([logprob_of(*pair) for pair in pairs], np.float32),
            np.array([rank_of(*pair) for pair in pairs], np.int32),
            np.array(best, np.int32).reshape(len(rows), most),
            np.array(
                [
                    [logprob_of(value, id_) for id_ in ids]
                    for value, ids in zip(seen, best, strict=True)
                ],
                np.float32,
            ).reshape(len(rows), most),
            more,
        )

    def reset(self) -> None:
        self.resets += 1
        self.device = FakeDevice(self.config.limits(), self.config.pool_pages)


class Story:
    """An engine, what was asked of it, and what it answered.

    Attributes:
        deltas: Every stream piece by request id, in order.
        records: The record of every step.
    """

    def __init__(self, *, tokenizer: Tokenizer | None = None, eos=(), hook=None, **options) -> None:
        self.config = EngineConfig(**{**OPTIONS, **options})
        self.executor = FakeExecutor(self.config)
        hooked = {} if hook is None else {"fault_hook": hook}
        self.eos = eos
        self.engine = Engine(
            self.config,
            self.executor,
            vocab_size=VOCABULARY,
            eos_token_ids=eos,
            tokenizer=tokenizer,
            **hooked,
        )
        self.deltas: dict[str, list[StreamDelta]] = {}
        self.records = []

    def add(self, name, prompt, **params) -> None:
        self.engine.add_request(name, prompt, SamplingParams(**{"seed": 1, **params}))
        self.deltas[name] = []

    def step(self):
        result = self.engine.step()
        self.records.append(result.record)
        for delta in result.deltas:
            self.deltas[delta.request_id].append(delta)
        return result

    def finish(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.engine.has_unfinished:
                return
            self.step()
        raise AssertionError(f"requests are unfinished after {limit} steps")

    def streamed(self, name) -> list[int]:
        """The tokens of all stream pieces so far."""
        return [token for delta in self.deltas[name] for token in delta.token_ids]

    def output(self, name) -> RequestOutput:
        """Release a finished request; its stream pieces must add up to its result."""
        output = self.engine.release(name)[0]
        (completion,) = output.outputs
        deltas = self.deltas[name]
        assert output.finished
        assert "".join(delta.text for delta in deltas) == completion.text
        assert self.streamed(name) == completion.token_ids
        ends = [delta for delta in deltas if delta.finish_reason is not None]
        assert ends == deltas[-1:], "the end is told once, with the last piece"
        (last,) = ends
        assert last.finish_reason == completion.finish_reason
        assert (last.stop_reason, last.error) == (completion.stop_reason, completion.error)
        return output

    def alone(self, prompt, **params) -> list[int]:
        """The tokens the rules demand, without an engine."""
        params = SamplingParams(**{"seed": 1, **params})
        return tokens_alone(
            prompt,
            params,
            seed=params.seed,
            eos=self.eos,
            max_model_len=self.config.max_model_len,
        )

    def check_idle(self) -> None:
        scheduler = self.engine.scheduler
        assert not self.engine.has_unfinished
        assert scheduler.running == []
        assert not scheduler.waiting
        assert scheduler.pages.free == scheduler.pages.capacity
        assert sorted(scheduler._residents.free_slots) == list(range(self.config.max_num_seqs))


def character_tokenizer() -> Tokenizer:
    """Token n is CHARACTERS[n]: positions in the text are positions among the tokens."""
    vocabulary = {spelling: number for number, spelling in enumerate(SPELLINGS)}
    assert len(vocabulary) == VOCABULARY
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)
