"""Catalogue D5: chunks and where they are written; logprobs and counts are listed in the README."""

import pytest
from catalogue.crowd import Crowd

LENGTH = 19


@pytest.mark.parametrize("budget", range(1, LENGTH + 1))
def test_every_chunk_is_written_behind_the_one_before(budget):
    """43: slots of a later chunk that ignore what is computed already."""
    crowd = Crowd(max_num_batched_tokens=budget, prefill_buckets=(budget,))
    # Its pages lie among those of the prompt.
    crowd.decode("decoding", max_tokens=50)
    crowd.ask("prompt", LENGTH, max_tokens=3)
    crowd.end()
    rows = [
        (entry.known, entry.sampled)
        for plan in crowd.plans
        for entry in plan.entries
        if entry.request_id == "prompt"
    ]
    known = 0
    for count, sampled in rows:
        known += count
        assert sampled == (known >= LENGTH)
