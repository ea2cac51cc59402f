"""Prefix cache, pages and their owners."""

from scripts.mutations.mutation import Mutation

TESTS = "tests/catalogue/test_d6_pages.py::"
GROWN = "            self.pages.extend(piece.request.pages, piece.start + piece.rows)\n"

PAGES = (
    Mutation(
        51,
        "pages are published when they are planned",
        "glm_jax/engine/scheduler.py",
        GROWN,
        GROWN
        + """            piece.request.computed += piece.rows
            self.prefix.publish(piece.request)
            piece.request.computed -= piece.rows
""",
        "tests/engine/test_prefix.py::"
        "test_nothing_is_found_before_the_step_that_wrote_it_is_committed",
    ),
    Mutation(
        52,
        "a step is split whoever reads what it writes",
        "glm_jax/engine/split_step.py",
        "        writers.get(page, entry) is not entry\n",
        "        writers.get(page, entry) is None\n",
        "tests/engine/test_split_step.py::"
        "test_a_step_whose_reader_begins_with_pages_written_in_it_stays_whole",
    ),
    Mutation(
        53,
        "who ends while a step is in flight gives its pages back at once",
        "glm_jax/engine/residents.py",
        "        if in_flight:\n",
        "        if in_flight and request.slot is None:\n",
        TESTS
        + "test_pages_of_a_request_that_ends_in_flight_are_not_handed_out_before_the_step_is_over",
    ),
    Mutation(
        54,
        "a page that is evicted is still found by its key",
        "glm_jax/engine/pages.py",
        """        page, _ = self._cached.popitem(last=False)
        del self._published[self._keys.pop(page)]
""",
        """        page, _ = self._cached.popitem(last=False)
        self._keys.pop(page)
""",
        TESTS + "test_no_key_of_an_earlier_text_finds_a_page_of_a_later_one",
    ),
    Mutation(
        55,
        "the key of a page says nothing of the token behind it",
        "glm_jax/engine/page_keys.py",
        "            if self._with_next:\n",
        "            if self._with_next and page < 0:\n",
        TESTS + "test_the_drafters_entry_at_a_page_end_is_that_of_the_token_behind_it",
    ),
)
