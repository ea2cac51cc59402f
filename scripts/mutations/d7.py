"""Drafts, late results, seeds, shared selections."""

from scripts.mutations.mutation import Mutation

TESTS = "tests/catalogue/test_d7_speculation.py::"

SPECULATION = (
    Mutation(
        56,
        "the place of a draft that is yet to be made stands in the request",
        "glm_jax/engine/request_update.py",
        "    request.draft_token_ids = drafts if len(drafts) <= room else drafts[: max(0, room)]\n",
        "    request.draft_token_ids = [*drafts[:-1], -1][: max(0, room)] if drafts else []\n",
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
        62,
        "all completions of a prompt have its seed",
        "glm_jax/engine/children.py",
        "(params.seed + index) % _SEEDS",
        "params.seed % _SEEDS",
        "tests/engine/test_children.py::test_completion_i_is_that_of_a_request_with_seed_plus_i",
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
        63,
        "all rows of a verify group see the output without drafts",
        "glm_jax/sampling/controls.py",
        "jnp.arange(rows.drafts.shape[1]) < number[:, None]",
        "jnp.arange(rows.drafts.shape[1]) < 0 * number[:, None]",
        "tests/engine/test_controls.py::"
        "test_penalties_are_not_double_counted_where_drafts_are_accepted",
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
