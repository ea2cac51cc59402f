"""Finds stop strings in streamed text and holds back what could become one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """A prefix of some stop string: a node of an Aho-Corasick automaton."""

    depth: int
    following: dict[str, "_State"] = field(default_factory=dict)
    # The longest proper suffix of this prefix that is a prefix of some stop string.
    fallback: "_State | None" = None
    # The longest stop string that this prefix ends with.
    match: str | None = None


class StopStrings:
    """Matcher over the text of one request.

    The stop string that is complete first wins, and among those complete at the same character the
    longest, so the result does not depend on how the text is cut into tokens. The text held back is
    the longest end of the text that is the beginning of a stop string, never more.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False):
        """Build the automaton.

        Args:
            stops: stop strings; none at all is allowed and matches nothing.
            include_in_output: give out the matched stop string itself too.

        Raises:
            ValueError: a stop string is empty.
        """
        self._include = include_in_output
        self._root = _State(0)
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = self._root
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what may be given out; sets `matched` when a stop is complete.

        Text after a match is dropped, and so is everything pushed later.
        """
        if self.matched is not None:
            return ""
        for position, character in enumerate(text):
            self._state = self._next(self._state, character)
            if self._state.match is not None:
                self.matched = self._state.match
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include else seen[: -len(self.matched)]
        seen = self._held + text
        split = len(seen) - self._state.depth
        self._held = seen[split:]
        return seen[:split]

    def finish(self) -> str:
        """End the text: return what was held back for a stop string that never came."""
        rest, self._held, self._state = self._held, "", self._root
        return rest

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string is empty; give at least one character, or leave it out")
        state = self._root
        for character in stop:
            state = state.following.setdefault(character, _State(state.depth + 1))
        state.match = stop

    def _link(self) -> None:
        """Set fallbacks breadth first: those of shorter prefixes are needed for longer ones."""
        queue = deque([self._root])
        while queue:
            state = queue.popleft()
            for character, child in state.following.items():
                child.fallback = (
                    self._root if state.fallback is None else self._next(state.fallback, character)
                )
                child.match = child.match or child.fallback.match
                queue.append(child)

    @staticmethod
    def _next(state: _State, character: str) -> _State:
        while character not in state.following:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.following[character]
