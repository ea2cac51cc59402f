"""What the target accepted, draft position by draft position."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm_jax.engine.outputs import GroupDrafts


class Acceptance(NamedTuple):
    """Rates of the drafts of many verified groups; the lists begin with the first draft.

    Attributes:
        groups: verified groups.
        length: tokens per group: accepted drafts and the one after them.
        of_all: share accepted of all drafts at the position.
        of_reached: share accepted of those before which all were; the model's card counts so.
        reached: how many those are.
    """

    groups: int
    length: float
    of_all: list[float]
    of_reached: list[float]
    reached: list[int]


def acceptance_of(groups: Sequence[GroupDrafts]) -> Acceptance:
    """Count verified groups; without any the length is 1."""
    longest = max((len(group.draft_token_ids) for group in groups), default=0)
    of_all, of_reached, reached = [], [], []
    for position in range(longest):
        offered = [group for group in groups if len(group.draft_token_ids) > position]
        arrived = [group for group in offered if group.accepted >= position]
        accepted = sum(group.accepted > position for group in arrived)
        of_all.append(accepted / len(offered))
        of_reached.append(accepted / max(len(arrived), 1))
        reached.append(len(arrived))
    length = 1 + sum(group.accepted for group in groups) / max(len(groups), 1)
    return Acceptance(len(groups), length, of_all, of_reached, reached)


def first_groups(groups: Iterable[GroupDrafts]) -> list[GroupDrafts]:
    """The first verified group of every request."""
    first: dict[str, GroupDrafts] = {}
    for group in groups:
        first.setdefault(group.request_id, group)
    return list(first.values())
