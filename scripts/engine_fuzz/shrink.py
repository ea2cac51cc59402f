"""Makes a life that fails smaller, while it still fails."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scripts.engine_fuzz.life import Guest, Life

# Options that change nothing.
NEUTRAL: dict[str, Any] = {
    "num_pages": 65,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_partial_prefills": 3,
    "watermark": 0.0,
    "step_policy": "mixed",
    "scheduling_policy": "fcfs",
    "max_overtakes": 0,
    "max_queued_requests": None,
    "enable_prefix_caching": True,
    "split_steps": False,
    "max_step_ms": None,
    "tbt_target_ms": None,
}


def shrink(life: Life, fails: Callable[[Life], bool], *, seconds: float) -> Life:
    """Return the smallest life found that fails.

    Args:
        life: It fails.
        fails: Lives a life.
        seconds: How long to try.
    """
    until = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(life):
            if time.monotonic() > until:
                return life
            if fails(candidate):
                life, smaller = candidate, True
                break
    return life


def _smaller(life: Life) -> Iterator[Life]:
    """Yield lives with one thing less."""
    for guests in _without_one(life.guests):
        if guests:
            yield dataclasses.replace(life, guests=guests)
    for faults in _without_one(life.faults):
        yield dataclasses.replace(life, faults=faults)
    yield from _simpler(life)
    for place, guest in enumerate(life.guests):
        for smaller in _smaller_guests(guest):
            guests = [*life.guests]
            guests[place] = smaller
            yield dataclasses.replace(life, guests=guests)


def _simpler(life: Life) -> Iterator[Life]:
    """Yield lives with one limit or option less."""
    plain: dict[str, Any] = {"mode": "full", "drafter": "own", "least_width": 1}
    plain |= {"budget": 64, "slots": 4}
    if life.drafter == "own":
        plain["drafts"] = 0
    for name, value in plain.items():
        if getattr(life, name) != value:
            yield dataclasses.replace(life, **{name: value})
    for name, value in NEUTRAL.items():
        if life.options.get(name, value) != value:
            options = {**life.options, name: value}
            if not options.get("long_prefill_token_threshold"):
                options["long_prefill_token_threshold_adaptive"] = False
            yield dataclasses.replace(life, options=options)


def _without_one(items: Iterable[Any]) -> Iterator[list[Any]]:
    items = list(items)
    for place in range(len(items)):
        yield items[:place] + items[place + 1 :]


def _smaller_guests(guest: Guest) -> Iterator[Guest]:
    """Yield guests that want one thing less."""
    if guest.abort is not None:
        yield guest._replace(abort=None)
    if guest.step:
        yield guest._replace(step=0)
    wish = guest.wish
    for name in wish.extra:
        extra = {other: value for other, value in wish.extra.items() if other != name}
        yield guest._replace(wish=dataclasses.replace(wish, extra=extra))
    for name, value in wish.params.items():
        params = {other: kept for other, kept in wish.params.items() if other != name}
        if name == "max_tokens" and value > 1:
            yield guest._replace(wish=wish.with_params(max_tokens=value // 2))
        elif name not in ("max_tokens", "temperature"):
            yield guest._replace(wish=dataclasses.replace(wish, params=params))
        elif name == "temperature" and value and wish.params.get("n", 1) == 1:
            yield guest._replace(wish=wish.with_params(temperature=0.0))
    size = len(wish.prompt)
    for cut in (size // 2, size - 1):
        if 0 < cut < size:
            yield guest._replace(wish=dataclasses.replace(wish, prompt=list(wish.prompt)[:cut]))
