import numpy as np
import pytest

from glm_jax.simulate.traces import AZURE_CODE, Arrival, generate, halves, read_trace, speed_up

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.1805900,396,0
2023-11-16 18:15:50.6805900,879,55
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1025, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 2000, "input_length": 1500, "output_length": 1, "hash_ids": [0, 3, 4]}
{"timestamp": 2500, "input_length": 7, "output_length": 1}
"""


def written(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_azure_rows_are_ordered_from_zero_with_at_least_one_token(tmp_path):
    trace = read_trace(written(tmp_path, "conv.csv", AZURE))
    assert [arrival[1:3] for arrival in trace] == [(374, 44), (879, 55), (396, 1)]
    assert [arrival.time for arrival in trace] == pytest.approx([0.0, 4.0, 4.5])


def test_mooncake_rows_are_in_milliseconds(tmp_path):
    trace = read_trace(written(tmp_path, "conversation.jsonl", MOONCAKE))
    assert [arrival[:3] for arrival in trace] == [(0.0, 1025, 500), (1.5, 1500, 1), (2.0, 7, 1)]
    assert [arrival.blocks for arrival in trace] == [(0, 1, 2), (0, 3, 4), ()]


def test_prompts_have_the_same_tokens_exactly_where_their_blocks_are_the_same(tmp_path):
    first, second, unknown = (
        list(arrival.tokens())
        for arrival in read_trace(written(tmp_path, "conversation.jsonl", MOONCAKE))
    )
    assert (len(first), len(second), unknown) == (1025, 1500, [0] * 7)
    same = [one == other for one, other in zip(first, second, strict=False)]
    assert same == [True] * 512 + [False] * (1025 - 512)
    blocks = [set(tokens[n : n + 512]) for tokens in (first, second) for n in (512, 1024)]
    assert len(set.union(*blocks)) == 4, "different ids have different tokens"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.txt", AZURE, r"ends in '\.txt'"),
        ("trace.csv", "a,b\n1,2\n", "KeyError"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("trace.jsonl", "not json\n", "cannot be read"),
        (
            "trace.jsonl",
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [7]}\n',
            "1 hash_ids for an input_length of 513; allowed: 2, one per 512 tokens",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_trace(written(tmp_path, name, text))


def test_a_generated_trace_is_repeatable_and_has_the_lengths_of_its_kind():
    trace = generate(AZURE_CODE, 4000, seed=3)
    assert trace == generate(AZURE_CODE, 4000, seed=3)
    assert trace != generate(AZURE_CODE, 4000, seed=4)
    assert np.median([arrival.prompt for arrival in trace]) == pytest.approx(1469, rel=0.1)
    assert np.median([arrival.output for arrival in trace]) == pytest.approx(13, rel=0.1)
    assert 4000 / trace[-1].time == pytest.approx(AZURE_CODE.rate, rel=0.1)
    assert min(arrival.prompt for arrival in trace) >= 1


def test_halves_start_at_zero_and_keep_their_density():
    trace = [Arrival(float(n), n + 1, 1) for n in range(10)]
    first, second = halves(trace)
    assert [arrival.prompt for arrival in second] == [6, 7, 8, 9, 10]
    assert [arrival.time for arrival in second] == [0, 1, 2, 3, 4]
    assert halves(trace, 2) == (first[:2], second[:2])
    with pytest.raises(ValueError, match="no halves"):
        halves(trace[:1])


def test_a_multiplier_makes_arrivals_faster():
    assert [arrival.time for arrival in speed_up([Arrival(6.0, 1, 1)], 3)] == [2.0]
    with pytest.raises(ValueError, match="must be > 0"):
        speed_up([], 0)
