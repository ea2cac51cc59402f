from bucketing.step_time import RowEquivalents
from glm_jax.engine.chunking import Decodes, Rules, choose_pieces, reserved_pages, scored_pairs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.pages import PagePool
from glm_jax.engine.prefix import PrefixCache
from glm_jax.engine.request import Request
from glm_jax.sampling.params import SamplingParams


def waiting(*lengths, max_tokens=8) -> list[Request]:
    requests = []
    for n, length in enumerate(lengths):
        request = Request(f"w{n}", [1] * length, SamplingParams(max_tokens=max_tokens))
        request.max_length = length + max_tokens
        requests.append(request)
    return requests


def running(pool, *states) -> list[Request]:
    """Requests with (length, computed); they hold the pages of their computed rows."""
    requests = waiting(*(length for length, _ in states))
    for slot, (request, (_, computed)) in enumerate(zip(requests, states, strict=True)):
        request.request_id = f"r{slot}"
        request.slot, request.computed = slot, computed
        request.pages = pool.allocate(pool.pages_for(computed))
    return requests


def decoding(pool, *lengths) -> list[Request]:
    requests = running(pool, *((length, length - 1) for length in lengths))
    for request in requests:
        request.prefill_end = request.length - 1
    return requests


def rules_of(config, pool, step_time=None) -> Rules:
    # Sharing pages is another matter (test_prefix.py).
    prefix = PrefixCache(pool, enabled=False, drafts=False)
    return Rules(config, config.grid(), pool, step_time or RowEquivalents(), prefix, drafter=False)


def pieces(run=(), wait=(), pool=None, held=(), **options) -> list[tuple[str, int]]:
    config = EngineConfig(**{"page_size": 4, "max_num_batched_tokens": 16, **options})
    pool = pool or PagePool(200, 4)
    rules = rules_of(config, pool)
    chosen = choose_pieces(rules, decodes_of(run), run, wait, held)
    return [(piece.request.request_id, piece.rows) for piece in chosen.pieces]


def decodes_of(run) -> Decodes:
    found = [request for request in run if request.decoding]
    pairs = sum(
        scored_pairs(request.computed, 1 + len(request.draft_token_ids)) for request in found
    )
    width = 1 + max((len(request.draft_token_ids) for request in found), default=0)
    return Decodes(found, width, pairs)


def test_running_prefills_come_before_waiting_ones_in_order():
    pool = PagePool(100, 4)
    run = running(pool, (10, 5), (6, 4))
    assert pieces(run, waiting(3, 9), pool) == [("r0", 5), ("r1", 2), ("w0", 3), ("w1", 6)]


def test_decoding_requests_get_no_piece():
    pool = PagePool(100, 4)
    assert pieces(decoding(pool, 9), waiting(3), pool) == [("w0", 3)]


def test_the_total_stays_within_the_budget():
    assert pieces(wait=waiting(40)) == [("w0", 16)]
    assert pieces(wait=waiting(40), max_num_batched_tokens=7) == [("w0", 7)]


def test_the_total_is_cut_to_a_bucket_where_that_is_cheaper():
    options = {"prefill_buckets": (64, 512), "max_num_batched_tokens": 512}
    assert pieces(wait=waiting(128), **options) == [("w0", 64)]
    assert pieces(wait=waiting(98, 30), **options) == [("w0", 64)]
    assert pieces(wait=waiting(30, 98), **options) == [("w0", 30), ("w1", 34)]
    # The rest of 66 rows would need the larger bucket as well.
    assert pieces(wait=waiting(130), **options) == [("w0", 130)]
    assert pieces(wait=waiting(500), **options) == [("w0", 500)]


def test_an_end_that_waited_does_not_wait_again():
    options = {"prefill_buckets": (64, 512), "max_num_batched_tokens": 512}
    assert pieces(wait=waiting(70, 55), **options) == [("w0", 64)]
    assert pieces(wait=waiting(70, 55), held={"w0"}, **options) == [("w0", 70), ("w1", 55)]
    assert pieces(wait=waiting(50, 75), held={"w0"}, **options) == [("w0", 50), ("w1", 14)]


def test_who_waits_for_a_better_fit_is_named():
    config = EngineConfig(page_size=4, max_num_batched_tokens=512)
    rules = rules_of(config, PagePool(200, 4))
    chosen = choose_pieces(rules, Decodes(), [], waiting(30, 40, 20))
    assert [piece.rows for piece in chosen.pieces] == [30, 34]
    assert chosen.held == {"w1", "w2"}


def test_no_more_requests_than_the_bucket_has_chunks():
    options = {"prefill_buckets": (64, 512), "max_num_batched_tokens": 512}
    assert len(pieces(wait=waiting(*[2] * 8), **options)) == 4
    assert len(pieces(wait=waiting(*[60] * 8), **options)) == 8


def test_slots_bound_admission():
    pool = PagePool(100, 4)
    run = decoding(pool, 5, 5)
    assert pieces(run, waiting(2, 2, 2), pool, max_num_seqs=3) == [("w0", 2)]


def test_admission_needs_pages_for_the_whole_prompt_and_one_token():
    assert pieces(wait=waiting(8), pool=PagePool(4, 4)) == [("w0", 8)]
    # Nine rows need three pages, two are left.
    pool = PagePool(4, 4)
    pool.allocate(1)
    assert pieces(wait=waiting(8), pool=pool) == []
    # With a single new token the ninth row is never computed.
    assert pieces(wait=waiting(8, max_tokens=1), pool=pool) == [("w0", 8)]


def test_admission_leaves_alone_what_running_prefills_still_need():
    pool = PagePool(11, 4)
    run = running(pool, (30, 8))
    # 31 rows need eight pages, two are held; of the eight free ones two are left for others.
    assert reserved_pages(pool, run) == 6
    assert pieces(run, waiting(7), pool, max_num_batched_tokens=32) == [("r0", 22), ("w0", 7)]
    assert pieces(run, waiting(8), pool, max_num_batched_tokens=32) == [("r0", 22)]


def test_nobody_overtakes_a_request_that_does_not_fit():
    pool = PagePool(4, 4)
    pool.allocate(1)
    assert pieces(wait=waiting(8, 1), pool=pool) == []


def test_the_watermark_holds_only_beside_others():
    assert pieces(wait=waiting(7), pool=PagePool(3, 4), watermark=0.5) == [("w0", 7)]
    pool = PagePool(4, 4)
    run = decoding(pool, 3)
    assert pieces(run, waiting(7), pool, watermark=0.5) == []
    assert pieces(run, waiting(7), pool, watermark=0.1) == [("w0", 7)]
    # The second of two admitted in one step is beside the first.
    assert pieces(wait=waiting(3, 3), pool=PagePool(3, 4), watermark=0.5) == [("w0", 3)]


def test_a_running_prefill_takes_the_pages_that_are_left():
    pool = PagePool(5, 4)
    run = running(pool, (20, 8))
    pool.allocate(1)
    assert pieces(run, pool=pool) == [("r0", 4)]
    pool.allocate(1)
    assert pieces(run, pool=pool) == []


def test_a_blocked_prefill_does_not_hold_up_one_with_room():
    pool = PagePool(5, 4)
    run = running(pool, (20, 8), (9, 6))
    assert pool.free == 0
    assert pieces(run, pool=pool) == [("r1", 2)]


def test_the_threshold_cuts_one_prompt_unless_it_is_alone():
    options = {"long_prefill_token_threshold": 4}
    assert pieces(wait=waiting(40), **options) == [("w0", 16)]
    assert pieces(wait=waiting(40, 40), **options) == [("w0", 4), ("w1", 4)]
    pool = PagePool(100, 4)
    assert pieces(decoding(pool, 9), waiting(40), pool, **options) == [("w0", 4)]


def test_the_adaptive_threshold_shares_the_budget_among_prefills_only():
    options = {
        "long_prefill_token_threshold": 4,
        "long_prefill_token_threshold_adaptive": True,
    }
    pool = PagePool(100, 4)
    run = decoding(pool, 9, 9, 9)
    assert pieces(run, waiting(40), pool, **options) == [("w0", 16)]
    assert pieces(run, waiting(40, 40), pool, **options) == [("w0", 8), ("w1", 8)]
    got = pieces(run, waiting(40, 40, 40, 40, 40), pool, **options)
    assert got == [("w0", 4), ("w1", 4), ("w2", 4), ("w3", 4)]


def test_partial_prefills_are_bounded():
    options = {"long_prefill_token_threshold": 4, "max_num_partial_prefills": 2}
    assert pieces(wait=waiting(40, 40, 40), **options) == [("w0", 4), ("w1", 4)]
    # A prompt that ends in this step is no partial one; one that is admitted and cut is.
    assert pieces(wait=waiting(40, 3, 40, 3), **options) == [
        ("w0", 4),
        ("w1", 3),
        ("w2", 4),
        ("w3", 3),
    ]
    pool = PagePool(100, 4)
    run = running(pool, (40, 8), (40, 8))
    assert pieces(run, waiting(40), pool, **options) == [("r0", 4), ("r1", 4)]
    # A partial prefill that ends in this step makes room for another.
    run = running(pool, (40, 8), (10, 8))
    assert pieces(run, waiting(40), pool, **options) == [("r0", 4), ("r1", 2), ("w0", 4)]


# The time of a step.


def test_scored_pairs_are_the_positions_of_the_rows_plus_one():
    assert scored_pairs(0, 1) == 1
    assert scored_pairs(5, 2) == 6 + 7
    assert scored_pairs(0, 4) == 1 + 2 + 3 + 4


class PairsTime:
    """A millisecond per row and one per hundred pairs."""

    def predict(self, cell, pairs):
        return 1e-3 * (cell.rows + pairs / 100)


def in_time(most, run=(), wait=(), pool=None, **options) -> list[int]:
    limits = {"page_size": 4, "max_num_batched_tokens": 64, "prefill_buckets": (8, 16, 32)}
    config = EngineConfig(**limits, max_step_ms=most, **options)
    rules = rules_of(config, pool or PagePool(200, 4), PairsTime())
    return [piece.rows for piece in choose_pieces(rules, decodes_of(run), run, wait).pieces]


def test_a_step_is_cut_to_its_predicted_time():
    assert in_time(100, wait=waiting(60)) == [60]
    assert in_time(60, wait=waiting(60)) == [32]
    assert in_time(20, wait=waiting(60)) == [16]


def test_decodes_count_for_the_time_of_a_step():
    pool = PagePool(200, 4)
    assert in_time(20, decoding(pool, 9), waiting(60), pool) == [16]
    assert in_time(18, decoding(pool, 401), waiting(60), pool) == [8]


def test_the_chunk_shrinks_as_its_prefix_grows():
    def chunk(computed: int) -> list[int]:
        pool = PagePool(2000, 4)
        return in_time(70, running(pool, (3000, computed)), pool=pool)

    assert [chunk(n) for n in (0, 100, 200, 500, 2500)] == [[32], [32], [16], [8], [8]]


def test_a_prefill_never_starves_for_the_time_of_a_step():
    pool = PagePool(200, 4)
    assert in_time(0.1, decoding(pool, 9, 9), waiting(60), pool) == [8]
    assert in_time(0.1, wait=waiting(3)) == [3]
