"""What each draft length yields while a number of groups decodes: choice, visits, trials.

The model of the next step is a pure decode step that makes as many drafts as it can verify next.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

from glm_jax.engine.acceptance import Acceptance, RequestAcceptance
from glm_jax.engine.draft_times import DraftTimes

# Steps of the first visit to a draft length and of later ones. The first step of each verifies the
# drafts of the length before and is not timed.
FIRST_VISIT = 8
VISIT = 5
# The same before speculation ends at a load: the share of the drafter is read from it.
LAST_VISIT = 16
# Steps between two visits where all lengths are as good: below 1 % of all steps.
VISIT_GAP = 120 * VISIT
# A length is visited less often by the square of how much worse it is, up to this factor.
RAREST = 16.0
# A trial of speculation, with a visit to every length, takes 1 / this of the time between two.
TRIAL_GAP = 120
# Steps between two choices.
CHOICE_STEPS = 8
# How much better a length must be to replace the current one. A change costs nothing itself.
BETTER = 1.01
# How much better, and at how many choices in a row, before speculation ends or starts at a load.
CLEARLY_BETTER = 1.02
VERDICTS = 4
# Where a row costs less than the time of so many tokens, nobody's drafts are cut for it.
CHEAP_ROW = 0.02
# A request's skill is rounded to 1 / this, so that few curves are computed.
SKILL_STEPS = 16


@runtime_checkable
class Speculator(Protocol):
    """What a policy reads and sets of a request.

    Attributes:
        computed: Tokens whose rows are in the cache.
        speculates: Whether drafts are made for it. Once False it stays so until all its rows are
            computed anew: rows that the drafter did not see are holes in the drafter's cache.
        acceptance: How its drafts fare beside the engine's; only "auto" keeps it up.
    """

    computed: int
    speculates: bool
    acceptance: RequestAcceptance


class DraftLoad:
    """The choice of a draft length while so many groups decode.

    Every length is visited for a few steps before the first choice, and rarely again.

    Attributes:
        plain: Whether requests had better not speculate at this load.
        cuts: Whether some request accepts so little that its last drafts are not worth their rows.
    """

    def __init__(self, groups: int, times: DraftTimes) -> None:
        """Start with speculation; `groups` is a size of the decode segment."""
        self.plain = False
        self.cuts = False
        self._times = times
        self._options, self._without = times.options(groups)
        self._best = len(self._options) - 1
        self._steps = 0
        self._choose_at = 0
        self._votes = 0
        # Visits to come, last first: the longest drafts tell most about acceptance.
        self._queue = [(index, FIRST_VISIT) for index in range(len(self._options))]
        self._visiting = 0
        self._visit_left = 0
        self._visited_at = [0] * len(self._options)
        self._changed_at = 0
        self._trial_gap = 0
        self._on_trial = False
        self._share_due = False
        self._limits: dict[int, int] = {}

    @property
    def exploring(self) -> bool:
        """Whether visits are planned or under way; while `plain`, they are a trial."""
        return bool(self._queue) or self._visit_left > 0

    def start_trial(self) -> bool:
        """Plan visits to every length if the last trial was long ago; return whether it was."""
        if self._steps - self._changed_at < self._trial_gap:
            return False
        self._changed_at = self._steps
        self._on_trial = True
        self._queue = [(index, VISIT) for index in range(len(self._options))]
        return True

    def next_length(
        self,
        requests: Sequence[Speculator],
        acceptance: Acceptance,
        speculating: bool,
    ) -> int:
        """Return the drafts to make in this step, before each request's own limits.

        Args:
            requests: The groups of the next step.
            acceptance: The engine's.
            speculating: Whether any of them speculates.
        """
        self._steps += 1
        if speculating and self._continue_visit():
            return self._options[self._visiting].drafts
        if self._steps >= self._choose_at:
            self._choose_at = self._steps + CHOICE_STEPS
            self._choose(requests, acceptance)
            if self._queue and speculating and self._continue_visit():
                return self._options[self._visiting].drafts
        return self._options[self._best].drafts

    def limit(self, request: Speculator) -> int:
        """Return the most drafts of a request that are worth their rows; see `cuts`."""
        return self._limits.get(_level(request), self._times.lengths[-1])

    def _continue_visit(self) -> bool:
        """Say whether this step belongs to a visit, and begin the next one where it is due."""
        if self._visit_left == 0:
            # Beside prefill rows a visit would time nothing.
            if not self._queue or self._times.untimed_cell:
                return False
            self._visiting, self._visit_left = self._queue.pop()
            self._visited_at[self._visiting] = self._steps
            self._options[self._visiting].times.shorten()
        self._visit_left -= 1
        # The times of the last step of a visit are known at the next step.
        self._choose_at = self._steps + 1
        return True

    def _plan_visit(self, rates: Sequence[float]) -> None:
        """Plan a visit to the length that is overdue most, if one is."""
        self._visited_at[self._best] = self._steps
        best, fair = rates[self._best], VISIT_GAP * (len(rates) - 1)
        overdue, index = max(
            # A length whose cell was not compiled at the last visit may be by now.
            (self._steps - at - fair * min((best / (rate or 2 * best)) ** 2, RAREST), index)
            for index, (at, rate) in enumerate(zip(self._visited_at, rates, strict=True))
        )
        if overdue > 0:
            self._queue.append((index, VISIT))

    def _choose(self, requests: Sequence[Speculator], acceptance: Acceptance) -> None:
        """Take the length with the most expected tokens per second, and judge speculation."""
        alike = Counter((_level(request), request.speculates) for request in requests)
        curves = {level: acceptance.curve(level / SKILL_STEPS) for level, _ in alike}
        mixed, everyone = _expected_tokens(self._times.lengths, alike, curves)
        context = sum(request.computed for request in requests)
        loads = [_pairs(option.drafts, context, len(requests)) for option in self._options]
        slopes = [
            self._times.per_pair(option.cell, pairs)
            for option, pairs in zip(self._options, loads, strict=True)
        ]
        seconds = self._seconds(loads, slopes)
        rates = [tokens / time for tokens, time in zip(mixed, seconds, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > BETTER * rates[self._best]:
            self._best = best
        rows = len(requests) * (self._options[self._best].drafts + 1)
        pair_tokens = slopes[self._best] * rates[self._best]
        self._limit_drafts(curves, pair_tokens * loads[self._best] / rows)
        if self.exploring:
            return
        if self._options[0].times.known:
            without = self._seconds_without(seconds[0], loads[0], slopes[0])
            most = max(tokens / time for tokens, time in zip(everyone, seconds, strict=True))
            self._judge(len(requests) / without, most)
            trial = VISIT * sum(time for time in seconds if time < float("inf")) / without
            self._trial_gap = int(TRIAL_GAP * trial)
        if not self.plain:
            self._plan_visit(rates)

    def _limit_drafts(self, curves: Mapping[int, Sequence[float]], row_tokens: float) -> None:
        """Find what each skill's drafts are worth; a row costs the time of `row_tokens` tokens.

        Pad rows fill the width anyway: what a row costs by itself is its scored pairs.
        """
        self._limits.clear()
        if row_tokens > CHEAP_ROW:
            for level, curve in curves.items():
                gains = (after - before for before, after in pairwise(curve))
                self._limits[level] = sum(gain >= row_tokens for gain in gains)
        length = self._options[self._best].drafts
        self.cuts = any(limit < length for limit in self._limits.values())

    def _seconds(self, loads: Sequence[int], slopes: Sequence[float]) -> list[float]:
        """Return each option's seconds; endless for one that was not timed while another was.

        A cell that is not compiled yet is not timed: its steps run piece by piece.
        """
        known = [option.times.known for option in self._options]
        if not any(known):
            predict = self._times.step_time.predict
            return [
                predict(option.cell, pairs)
                for option, pairs in zip(self._options, loads, strict=True)
            ]
        return [
            option.times.seconds(pairs, slope) if option.times.known else float("inf")
            for option, pairs, slope in zip(self._options, loads, slopes, strict=True)
        ]

    def _seconds_without(self, with_drafter: float, pairs: int, slope: float) -> float:
        """Return the seconds of a step without drafts and drafter.

        They are measured only while nobody speculates. Meanwhile the share that the drafter takes
        is what lasts: it depends little on the machine's state and the length of the requests.
        """
        times = self._times
        if self.plain and self._without.times.known:
            seconds = self._without.times.seconds(pairs, slope)
            if self._share_due and len(self._without.times) >= LAST_VISIT:
                self._share_due = False
                times.learn_share(1.0 - seconds / with_drafter)
            return seconds
        return with_drafter * (1.0 - times.drafter_share)

    def _judge(self, plain_rate: float, rate: float) -> None:
        """Compare tokens per second without the drafter and with, if all requests speculated."""
        now, other = (plain_rate, rate) if self.plain else (rate, plain_rate)
        self._votes = self._votes + 1 if other > CLEARLY_BETTER * now else 0
        if self._votes >= VERDICTS or (self._votes and self._on_trial):
            if not self.plain and self._steps - self._visited_at[0] > 2 * LAST_VISIT:
                # The share of the drafter shows only beside times of the same minute.
                self._queue.append((0, LAST_VISIT))
                return
            self.plain = not self.plain
            self._votes = 0
            self._changed_at = self._steps
            self._without.times.shorten(0)
            self._share_due = self.plain
        self._on_trial = False


def _level(request: Speculator) -> int:
    """Return a request's skill, rounded."""
    return int(request.acceptance.skill * SKILL_STEPS + 0.5)


def _pairs(drafts: int, context: int, groups: int) -> int:
    """Return the scored pairs of groups of 1 + drafts rows after `context` tokens in all."""
    rows = drafts + 1
    return rows * context + groups * rows * (rows + 1) // 2


def _expected_tokens(
    lengths: Sequence[int],
    alike: Mapping[tuple[int, bool], int],
    curves: Mapping[int, Sequence[float]],
) -> tuple[list[float], list[float]]:
    """Return the tokens of a step per draft length: as requests are, and if all speculated.

    That a request near its end makes fewer drafts is left out: its successor would start with the
    choice that suited an end.

    Args:
        lengths: The draft lengths.
        alike: Requests by skill level and whether they speculate.
        curves: Per level the expected tokens of a group, by drafts.
    """
    mixed, everyone = [0.0] * len(lengths), [0.0] * len(lengths)
    for (level, speculates), count in alike.items():
        curve = curves[level]
        for index, length in enumerate(lengths):
            tokens = count * curve[length]
            everyone[index] += tokens
            mixed[index] += tokens if speculates else count
    return mixed, everyone
