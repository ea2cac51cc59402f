"""Who waits for whom."""

from scripts.mutations.mutation import Mutation

TESTS = "tests/catalogue/test_d3_starvation.py::"
DECODES = "choose_decodes(self._residents.requests, self.pages, self._preempt)"
MIXED = f"""            decodes = {DECODES}
            return decodes, self._choose_pieces(decodes)
        if"""

STARVATION = (
    Mutation(
        21,
        "a step with prompt rows has no decodes",
        "glm_jax/engine/scheduler.py",
        MIXED,
        f"""            choice = self._choose_pieces(Decodes())
            return Decodes() if choice.pieces else {DECODES}, choice
        if""",
        TESTS + "test_a_decode_gets_tokens_in_every_step_of_a_stream_of_long_prompts",
    ),
    Mutation(
        22,
        "a prompt takes the whole budget beside decodes too",
        "glm_jax/engine/chunking.py",
        "        return min(threshold, budget)\n",
        "        return budget\n",
        TESTS + "test_a_long_prompt_beside_decodes_is_computed_in_chunks_of_the_cap",
    ),
    Mutation(
        23,
        "no prompt is cut for the sake of others",
        "glm_jax/engine/chunking.py",
        "    threshold = config.long_prefill_token_threshold\n",
        "    threshold = 0\n",
        "tests/engine/test_scheduler.py::test_short_prompts_do_not_wait_for_a_whole_long_one",
    ),
    Mutation(
        24,
        "the threshold holds for a prompt that is alone",
        "glm_jax/engine/chunking.py",
        "    if threshold == 0 or len(running) + len(waiting) <= 1:\n",
        "    if threshold == 0:\n",
        TESTS + "test_a_prompt_that_is_alone_uses_the_whole_budget",
    ),
    Mutation(
        25,
        "a prompt is admitted where its first chunk fits",
        "glm_jax/engine/chunking.py",
        "        if need > free - watermark:\n",
        """        free = pool.free
        need = pool.pages_for(min(request.length, budget))
        if need > free - watermark:
""",
        "tests/engine/test_preemption.py::"
        "test_long_prompts_in_a_pool_of_one_and_a_half_do_not_thrash",
    ),
    Mutation(
        26,
        "a request that is larger than the pool is queued",
        "glm_jax/engine/admission.py",
        "    if needed > pages.capacity:\n",
        "    if needed > 10 * pages.capacity:\n",
        "tests/engine/test_scheduler.py::test_a_request_that_can_never_run_is_refused",
    ),
    Mutation(
        27,
        "a victim keeps the drafts that were made for it",
        "glm_jax/engine/scheduler.py",
        "        request.draft_token_ids = ()\n        self.waiting.add(request)\n",
        "        self.waiting.add(request)\n",
        "tests/engine/test_queue.py::test_a_victim_that_drafted_gives_everything_back",
    ),
    Mutation(
        28,
        "preempted requests go to the end of the queue",
        "glm_jax/engine/waiting.py",
        "        insort(self._requests, request, key=self.turn)\n",
        "        self._requests.append(request)\n",
        "tests/engine/test_preemption.py::"
        "test_preempted_requests_resume_before_later_arrivals_in_their_old_order",
    ),
    Mutation(
        29,
        "an allocation does not see the pages that its victim gave back",
        "glm_jax/engine/decode_rows.py",
        "    while missing > pages.free:\n",
        "    free = pages.free\n    while missing > free:\n",
        TESTS + "test_an_allocation_preempts_as_few_as_it_needs",
    ),
    Mutation(
        31,
        "decodes get what the prompts left of the budget",
        "glm_jax/engine/scheduler.py",
        MIXED,
        f"""            choice = self._choose_pieces(Decodes())
            if sum(piece.rows for piece in choice.pieces) == self.grid.prefill.largest:
                return Decodes(), choice
            decodes = {DECODES}
            return decodes, self._choose_pieces(decodes)
        if""",
        TESTS + "test_no_budget_of_prompt_rows_stops_a_decode",
    ),
)
