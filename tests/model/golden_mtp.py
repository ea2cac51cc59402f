"""The golden checkpoint with an MTP layer, and steps of a chunk and a group on it, by hand."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from model.open_step import read_parameters

from bucketing.grid import Cell
from bucketing.pack import Chunk, Group, RankRows, SlotReset, SlotSettings, pack
from bucketing.step_inputs import Limits, StepInputs
from glm_jax.model.cache import CACHE_FORMATS, Cache, cache_shapes
from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import parameter_specs
from glm_jax.model.slots import Slots, empty_slots
from glm_jax.model.storage import ParameterStore, split_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "mtp"
NUM_DRAFTS = 5
CELL = Cell(64, 1, 1 + NUM_DRAFTS)
LIMITS = Limits(max_num_seqs=2, pages_per_seq=8, page_size=16, num_drafts=NUM_DRAFTS)
CHUNKS = LIMITS.chunks(CELL)
REQUESTS = CHUNKS + CELL.groups
NUM_PAGES = 2 * LIMITS.pages_per_seq + 1
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())


class Golden(NamedTuple):
    config: GlmConfig
    parameters: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]

    @property
    def tokens(self) -> np.ndarray:
        """Prompt, then what the target generates greedily."""
        return self.reference["tokens"]

    @property
    def prompt(self) -> np.ndarray:
        return self.tokens[: self.reference["prompt_tokens"]]

    @property
    def generated(self) -> np.ndarray:
        return self.tokens[self.reference["prompt_tokens"] :]


@functools.cache
def golden() -> Golden:
    # transformers' eps of the latent norms.
    config = GlmConfig.from_hf(GOLDEN).replace(latent_norm_eps=1e-6)
    with np.load(GOLDEN / "reference.npz") as reference:
        return Golden(config, read_parameters(GOLDEN, config), dict(reference))


def leaves_of(parameters: dict[str, np.ndarray]) -> list:
    store = ParameterStore(golden().config, dtype="float32", storage="per_layer")
    for name in parameter_specs(golden().config):
        store.destination(name)[...] = parameters[name]
    return split_model(store.to_device(jax.devices("cpu")[0]))[1]


def empty_state() -> tuple[Cache, Slots]:
    """Cache and slots with the rank axis in front."""
    shapes = cache_shapes(
        golden().config,
        CACHE_FORMATS["float32"],
        num_pages=NUM_PAGES,
        page_size=LIMITS.page_size,
    )
    cache = jax.tree.map(lambda spec: np.zeros((1, *spec.shape), spec.dtype), shapes)
    return cache, empty_slots(LIMITS, 1)


def with_drafts(slots: Slots, slot: int, tokens: np.ndarray | int) -> Slots:
    """Put drafts of our own in place of those that a step made."""
    drafts = slots.drafts.copy()
    drafts[0, slot] = tokens
    return slots._replace(drafts=drafts)


def inputs_of(rows: RankRows, new_drafts: int) -> StepInputs:
    """One step's inputs; every request that draws a token wants as many new drafts."""

    def wanting(entry):
        return entry._replace(new_drafts=new_drafts if entry.sampled else 0)

    chunks, groups = map(wanting, rows.chunks), map(wanting, rows.groups)
    return pack(CELL, LIMITS, [rows._replace(chunks=list(chunks), groups=list(groups))])


def chunk(slot: int, start: int, stop: int, *, tokens: np.ndarray | None = None) -> Chunk:
    """Some of a text, by default the prompt; the token after it is not known."""
    tokens = golden().prompt if tokens is None else tokens
    following = np.append(tokens, 0)[start + 1 : stop + 1].astype(np.int32)
    return Chunk(slot, tokens[start:stop], following, sampled=stop == len(tokens))


def verify(slot: int, drafts: int = NUM_DRAFTS) -> Group:
    """A decoding request's rows."""
    return Group(slot, True, 1, drafts, None, None, True)


def reset(slot: int, pages: range) -> SlotReset:
    return SlotReset(slot, pages, 0, GREEDY)


def half_right_drafts() -> np.ndarray:
    """Two right ones behind the prompt's next token, and three wrong ones."""
    wrong = (golden().generated[3:6] + 1) % golden().config.vocab_size
    return np.concatenate([golden().generated[1:3], wrong])


def verify_beside_a_prompt() -> RankRows:
    """Slot 0 verifies; slot 1 prefills the prompt.

    The pages of slot 1 descend: its entries and positions are in different orders.
    """
    return RankRows(
        groups=[verify(0)],
        chunks=[chunk(1, 0, len(golden().prompt))],
        resets=[reset(1, range(16, 8, -1))],
        drafter=True,
    )
