"""The replay of a trace with block ids finds what the ids promise."""

import json

from glm_jax.simulate.traces import read_trace
from scripts.replay_prefix import ideal, replay, replay_alone

# Three turns of a conversation, another one that begins as it does, and its second turn again; the
# last block of a prompt is its own.
PROMPTS = [(0, 1, 90), (0, 1, 2, 91), (0, 1, 2, 3, 92), (0, 4, 5, 93), (0, 1, 2, 94)]
BLOCKS, SEEN = 20, 0 + 2 + 3 + 1 + 3


def trace_of(folder, gap):
    """A request every so many milliseconds; the last block has 100 tokens."""
    path = folder / "trace.jsonl"
    lines = [
        {
            "timestamp": n * gap,
            "input_length": 512 * (len(ids) - 1) + 100,
            "output_length": 5,
            "hash_ids": ids,
        }
        for n, ids in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path)


def test_one_after_the_other_finds_what_the_ids_promise(tmp_path):
    arrivals = trace_of(tmp_path, 0)
    assert ideal(arrivals) == SEEN
    found = replay_alone(arrivals, 64)
    assert found["blocks"] == BLOCKS
    assert found["hit_ratio"] == found["ideal"] == round(SEEN / BLOCKS, 4)


def test_all_at_once_find_the_same_and_compute_nothing_twice(tmp_path):
    found = replay(trace_of(tmp_path, 0), 64)
    assert found["waits_for_a_page"] > 0
    assert (found["computed_twice"], found["evictions"]) == (0, 0)
    assert found["hit_ratio"] == round(SEEN / BLOCKS, 4)


def test_a_pool_for_one_prompt_evicts(tmp_path):
    found = replay(trace_of(tmp_path, 10_000), 6)
    assert found["evictions"] > 0
    assert found["hit_ratio"] < SEEN / BLOCKS
