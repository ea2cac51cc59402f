"""How many drafts the target accepts: counts for metrics, and recent rates to plan by. Host-only.

A draft counts as accepted only if all before it in its group were. A group without drafts verifies
nothing and is not counted.
"""

from glm_jax.engine.config import MAX_DRAFTS

# Published acceptance of GLM-5's MTP layer is 0.7 to 0.85 for the first draft and falls slowly.
FIRST_RATE = 0.7
FALL = 0.95
# Verified groups that the prior of a position weighs.
PRIOR_GROUPS = 8.0
# Steps after which a verified group counts half.
HALF_LIFE = 256
# No draft is certain: a rate of 1 would make every longer draft look free of risk.
HIGHEST_RATE = 0.99

# A request is compared with the engine over about 1 / (1 - this) of its last verified groups.
REQUEST_MEMORY = 0.99
# Accepted drafts that "as the engine's average" weighs for a request.
REQUEST_PRIOR = 24.0

_ROW = MAX_DRAFTS + 1


class Tally:
    """Counts of all verified groups, by their drafts and how many of those were accepted."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        """Count from zero."""
        # Flat, [drafts, accepted]: a verified group costs one increment; sums are made on demand.
        self._counts = [0] * (_ROW * _ROW)

    def observe(self, drafts: int, accepted: int) -> None:
        """Count one verified group; `drafts` is at most MAX_DRAFTS."""
        assert 0 <= accepted <= drafts < _ROW, f"{drafts=} {accepted=}"
        if drafts:
            self._counts[drafts * _ROW + accepted] += 1

    @property
    def steps(self) -> int:
        """Verified groups: those that had drafts."""
        return sum(self._counts)

    @property
    def drafts(self) -> int:
        """Drafts verified."""
        return sum(self.offered_at)

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_at)

    @property
    def mean_length(self) -> float:
        """Tokens per verified group, accepted drafts and the bonus; 1.0 if nothing was verified."""
        return 1.0 + self.accepted / max(self.steps, 1)

    @property
    def offered_at(self) -> tuple[int, ...]:
        """Per draft position, 0-based: verified groups that had a draft there."""
        rows = [sum(self._counts[d * _ROW : (d + 1) * _ROW]) for d in range(_ROW)]
        return tuple(sum(rows[position + 1 :]) for position in range(MAX_DRAFTS))

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """Per draft position, 0-based: groups whose draft there was accepted."""
        columns = [sum(self._counts[accepted::_ROW]) for accepted in range(_ROW)]
        return tuple(sum(columns[position + 1 :]) for position in range(MAX_DRAFTS))

    @property
    def per_position(self) -> tuple[float, ...]:
        """Per draft position: accepted over offered; 0.0 where none was offered."""
        pairs = zip(self.accepted_at, self.offered_at, strict=True)
        return tuple(accepted / max(offered, 1) for accepted, offered in pairs)


class Acceptance(Tally):
    """The engine's acceptance: all counts, and recent rates that change only at a refresh."""

    __slots__ = ("_hits", "_rates", "_recent", "_seen")

    def __init__(self) -> None:
        """Start from the prior."""
        super().__init__()
        self._seen = list(self._counts)
        self._recent = [0.0] * len(self._counts)
        self._rates: tuple[float, ...] = ()
        self._hits: tuple[float, ...] = ()
        self._estimate()

    def rate(self, position: int) -> float:
        """Return P(the draft at `position` is accepted | all before it are), 0-based."""
        return self._rates[position]

    def expected_tokens(self, drafts: int) -> float:
        """Return the tokens that a group with so many drafts yields, the bonus included."""
        return self.curve()[drafts]

    def curve(self, skill: float = 1.0) -> tuple[float, ...]:
        """Return the expected tokens of 0 to MAX_DRAFTS drafts, for a request of this skill."""
        reached = total = 1.0
        tokens = [total]
        for rate in self._rates:
            reached *= min(rate * skill, HIGHEST_RATE)
            total += reached
            tokens.append(total)
        return tuple(tokens)

    def hits(self, tested: int) -> float:
        """Return the accepted drafts to expect when the target reached `tested` of a group."""
        return self._hits[tested]

    def refresh(self, steps: int = 1) -> None:
        """Take what was observed since the last refresh, `steps` steps ago, into the rates."""
        decay = 0.5 ** (steps / HALF_LIFE)
        counts = self._counts
        self._recent = [
            old * decay + new - seen
            for old, new, seen in zip(self._recent, counts, self._seen, strict=True)
        ]
        self._seen = counts.copy()
        self._estimate()

    def forget(self, groups: int) -> None:
        """Let all that was seen weigh as at most so many groups: other text may have come since."""
        weight = sum(self._recent)
        if weight > groups:
            self._recent = [count * groups / weight for count in self._recent]
            self._estimate()

    def _estimate(self) -> None:
        """Set the rates.

        A position's rate is that of the position before it times their ratio among the groups that
        had drafts at both. So positions that were not offered lately follow those that were, and
        it does not matter that long drafts go to requests that accept much.
        """
        recent = self._recent
        groups = [0.0] * (_ROW + 1)  # of groups with more than `position` drafts: by accepted
        rates = [0.0] * MAX_DRAFTS
        ratios = [(0.0, 0.0, 0.0)] * MAX_DRAFTS
        for position in reversed(range(MAX_DRAFTS)):
            start = (position + 1) * _ROW
            for accepted in range(position + 2):
                groups[accepted] += recent[start + accepted]
            passed = sum(groups[position + 1 :])
            reached = passed + groups[position]
            before = reached + groups[position - 1] if position else reached
            ratios[position] = passed, reached, before
        rate, fall = FIRST_RATE, 1.0
        for position, (passed, reached, before) in enumerate(ratios):
            own_before = (reached + PRIOR_GROUPS * rate) / (before + PRIOR_GROUPS)
            if position == 0:
                own_before = rate
            prior = PRIOR_GROUPS * own_before * fall
            own = (passed + prior) / (reached + PRIOR_GROUPS)
            rate = rates[position] = min(rate * own / own_before, HIGHEST_RATE)
            fall = FALL
        self._rates = tuple(rates)
        self._hits = tuple(sum(rates[:tested], 0.0) for tested in range(_ROW))


class RequestAcceptance:
    """A request's acceptance: one figure that compares it with the engine's.

    Its rate at every position is taken to be the engine's times `skill`; a new request has 1.
    """

    __slots__ = ("_expected", "_hits")

    def __init__(self) -> None:
        """Start as the engine's average."""
        self._hits = self._expected = REQUEST_PRIOR

    def compare(self, drafts: int, accepted: int, engine: Acceptance) -> None:
        """Compare one verified group with what the engine's rates expect."""
        tested = accepted + (accepted < drafts)
        fresh = (1.0 - REQUEST_MEMORY) * REQUEST_PRIOR
        self._hits = self._hits * REQUEST_MEMORY + fresh + accepted
        self._expected = self._expected * REQUEST_MEMORY + fresh + engine.hits(tested)

    @property
    def skill(self) -> float:
        """Recent accepted drafts over those that the engine's rates would expect."""
        return self._hits / self._expected
