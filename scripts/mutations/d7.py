"""Drafts, late results, seeds, shared selections."""

from scripts.mutations.mutation import Mutation

TESTS = "tests/catalogue/test_d7_speculation.py::"

SPECULATION = (
    Mutation(
        56,
        "the place of a draft that is yet to be made stays in the request",
        "glm_jax/engine/request_update.py",
        "    request.draft_token_ids = drafts if len(drafts) <= room else drafts[: max(0, room)]\n",
        "    request.draft_token_ids = [*drafts, -1][: max(0, room)] if drafts else []\n",
        TESTS + "test_every_token_id_of_a_step_is_one_even_where_a_request_missed_the_last",
    ),
    Mutation(
        57,
        "a step stays in flight when everyone in it lost its pages",
        "glm_jax/engine/scheduler.py",
        "        self.pool_resets += 1\n        self._in_flight = None\n",
        "        self.pool_resets += 1\n",
        TESTS + "test_a_late_result_changes_no_request_that_lost_its_pages_meanwhile",
    ),
    Mutation(
        62,
        "the random numbers of a draw depend on its row",
        "glm_jax/model/draw.py",
        "        position=rows.positions[row] + 1,\n",
        "        position=row + 1,\n",
        TESTS + "test_a_seed_draws_the_same_tokens_in_mixed_steps_chunk_by_chunk",
    ),
    Mutation(
        63,
        "a line is told the whole output again before every step",
        "glm_jax/engine/control_book.py",
        "request.tokens[max(told, prompt) :]",
        "request.tokens[prompt:]",
        TESTS + "test_penalties_count_each_token_once_whatever_was_drafted",
    ),
    Mutation(
        64,
        "later passes of the drafter take the first selections of the step",
        "glm_jax/model/mtp.py",
        "(first.y, first.selection))\n    return Pass(y, selection, first.cache)\n",
        """(first.y, first.selection))
    selection = jax.tree.map(lambda array: array[: starts.last.size], first.selection)
    return Pass(y, selection, first.cache)
""",
        "tests/model/test_mtp.py::"
        "test_drafts_behind_a_partly_accepted_group_beside_a_prompt_equal_transformers_layer",
    ),
)
