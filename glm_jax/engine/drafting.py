"""Which drafts a step makes for the next one: asked of the policy, cut to room and pages."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bucketing.grid import Grid
from bucketing.step_time import StepTime
from glm_jax.engine.chunking import Decodes, Piece, reserved_pages
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.draft_policy import AutoDrafts, DraftPolicy, FixedDrafts
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import Request


def policy_of(config: EngineConfig, grid: Grid, step_time: StepTime) -> DraftPolicy:
    """Return the policy that `num_speculative_tokens` asks for."""
    if config.num_speculative_tokens == "auto":
        return AutoDrafts(config.num_drafts, grid, step_time)
    return FixedDrafts(config.num_drafts)


class NextDrafts(NamedTuple):
    """The drafts that a step makes.

    Attributes:
        drafter: Whether the MTP layer runs over the step's rows.
        lengths: Drafts by request id; ids without any are left out.
        ahead: Positions behind a request's rows that the passes may write, by request id.
    """

    drafter: bool = False
    lengths: Mapping[str, int] = {}
    ahead: Mapping[str, int] = {}


NO_DRAFTS = NextDrafts()


class Drafting:
    """Decides a step's drafts.

    Models that share the first pass's selection among all passes write nothing ahead. In others
    pass j writes position last + j, so n drafts need pages for n - 1 rows more; where they are not
    free without touching what running prefills were promised, fewer drafts are made.

    Attributes:
        policy: How many drafts are worth making.
        writes_ahead: Whether later passes write the cache.
    """

    def __init__(self, policy: DraftPolicy, pool: PagePool, *, writes_ahead: bool) -> None:
        """Take what the engine was built with."""
        self.policy = policy
        self.writes_ahead = writes_ahead
        self._pool = pool

    def decide(
        self, decodes: Decodes, pieces: Sequence[Piece], running: Sequence[Request]
    ) -> NextDrafts:
        """Return the drafts of a step; grows page tables by the pages that making them needs.

        Args:
            decodes: Who decodes in it.
            pieces: Its prefill rows.
            running: All running requests.
        """
        if not self.policy.most_drafts:
            return NO_DRAFTS
        ends = [piece for piece in pieces if piece.final]
        requests = [*decodes.requests, *(piece.request for piece in ends)]
        # However few drafts of this step are accepted, its first draw is behind so many rows.
        known = [1] * len(decodes.requests) + [piece.rows for piece in ends]
        # The last token of all is never computed, and one row verifies nothing.
        rooms = [
            max(0, request.most_rows - request.computed - rows - 1)
            for request, rows in zip(requests, known, strict=True)
        ]
        chosen = self.policy.new_drafts(requests, rooms)
        if not self.policy.drafter([*requests, *(piece.request for piece in pieces)]):
            return NO_DRAFTS
        lengths = {
            request.request_id: count
            for request, count in zip(requests, chosen, strict=True)
            if count
        }
        if not self.writes_ahead or not lengths:
            return NextDrafts(True, lengths)
        rows = [
            count + len(one.draft_token_ids) for one, count in zip(requests, known, strict=True)
        ]
        return NextDrafts(True, *self._with_pages(requests, rows, lengths, running))

    def _with_pages(
        self,
        requests: Sequence[Request],
        rows: Sequence[int],
        lengths: Mapping[str, int],
        running: Sequence[Request],
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the lengths that have pages, and the rows ahead that they need.

        Args:
            requests: Those that draw a token.
            rows: Of each in the step, drafts included.
            lengths: Drafts by request id.
            running: All running requests.
        """
        pool = self._pool
        spare = max(0, pool.free - reserved_pages(pool, running))
        cut, ahead = {}, {}
        for request, count in zip(requests, rows, strict=True):
            wanted = lengths.get(request.request_id, 0)
            if not wanted:
                continue
            end = request.computed + count
            held = len(request.pages)
            # Nothing is written past the last row that the request can ever have.
            most = min((held + spare) * pool.page_size, request.most_rows) - end
            length = min(wanted, 1 + most)
            pool.extend(request.pages, end + length - 1)
            spare -= len(request.pages) - held
            cut[request.request_id] = length
            ahead[request.request_id] = length - 1
        return cut, ahead
