"""Classification and shapes."""

from scripts.mutations.mutation import Mutation

TESTS = "tests/catalogue/test_d1_shapes.py::"
BUCKETS, BUDGET = "self.prefill_buckets", "self.max_num_batched_tokens"
BUDGET_AXIS = f'            Axis.cut("prefill rows", {BUCKETS}, {BUDGET}),\n'

SHAPES = (
    Mutation(
        1,
        "rows that fit into a verify group are of class DECODE",
        "glm_jax/engine/plan_rows.py",
        "        RowClass.PREFILL,\n        piece.rows,\n",
        "        RowClass.DECODE if piece.rows <= 6 else RowClass.PREFILL,\n        piece.rows,\n",
        TESTS + "test_a_prompt_as_long_as_a_verify_group_is_not_decoded",
    ),
    Mutation(
        2,
        "a cell is chosen whose groups are narrower than the longest one",
        "glm_jax/engine/placement.py",
        "        if allowed < width:\n",
        "        if allowed < 1:\n",
        TESTS + "test_no_verify_group_is_split_where_the_bucket_is_not_full",
    ),
    Mutation(
        3,
        "groups are sorted by rows, and what stands behind the first prefill is one",
        "glm_jax/engine/plan_rows.py",
        "    resets, updates = _differences(pool, (*chunk_entries, *group_entries))\n",
        """    order = sorted(range(len(groups)), key=lambda place: group_entries[place].rows)
    groups = [groups[place] for place in order]
    group_entries = [group_entries[place] for place in order]
    kinds = [entry.row_class for entry in group_entries]
    if RowClass.PREFILL in kinds:
        for place in range(kinds.index(RowClass.PREFILL), len(kinds)):
            group_entries[place] = group_entries[place]._replace(row_class=RowClass.PREFILL)
    resets, updates = _differences(pool, (*chunk_entries, *group_entries))
""",
        TESTS + "test_a_tail_of_one_token_turns_no_verify_group_into_a_prefill",
    ),
    Mutation(
        4,
        "decodes with and without drafts exclude each other",
        "glm_jax/engine/plan_rows.py",
        "    resets, updates = _differences(pool, (*chunk_entries, *group_entries))\n",
        """    known = {entry.rows for entry in group_entries}
    assert len(known) <= 1, "verify groups beside groups of one row"
    resets, updates = _differences(pool, (*chunk_entries, *group_entries))
""",
        TESTS + "test_a_tail_of_one_token_shares_a_step_with_and_without_drafts",
    ),
    Mutation(
        5,
        "the largest bucket is below a budget that is none",
        "glm_jax/engine/config.py",
        BUDGET_AXIS,
        BUDGET_AXIS.replace(BUDGET, f"max(size for size in {BUCKETS} if size <= {BUDGET})"),
        TESTS + "test_a_full_step_has_a_bucket_whatever_the_budget",
    ),
    Mutation(
        6,
        "the largest bucket is above a budget that is none",
        "glm_jax/engine/config.py",
        BUDGET_AXIS,
        BUDGET_AXIS.replace(BUDGET, f"min(size for size in {BUCKETS} if size >= {BUDGET})"),
        TESTS + "test_the_first_token_of_a_full_chunk_is_right_just_above_a_power_of_two",
    ),
    Mutation(
        7,
        "what is drawn has a line per prompt, not per place for one",
        "bucketing/pack.py",
        '        "chunk_sampled": sampled,\n',
        '        "chunk_sampled": sampled[:, : max(len(rank.chunks) for rank in rows)],\n',
        TESTS + "test_how_many_prompts_end_in_a_step_changes_no_shape",
    ),
    Mutation(
        8,
        "page updates are None where there are none",
        "bucketing/pack.py",
        "        changed |= _pack_pages(neutral, rows)\n",
        """        changed |= _pack_pages(neutral, rows)
    else:
        changed |= dict.fromkeys(("page_slot", "page_index", "page_value"))
""",
        TESTS + "test_the_first_use_of_a_feature_changes_no_shape",
    ),
    Mutation(
        9,
        "whether the drafter runs is a static value",
        "bucketing/pack.py",
        '        changed["drafter"] = np.array([rank.drafter for rank in rows])\n',
        '        changed["drafter"] = True\n',
        TESTS + "test_a_feature_that_comes_and_goes_changes_no_shape",
    ),
    Mutation(
        10,
        "decode rows are scored with the first rows of the step",
        "glm_jax/model/selection.py",
        "jax.tree.map(lambda array: array[prefill_rows:], index)",
        "jax.tree.map(lambda array: array[: groups * width], index)",
        "tests/model/test_step.py::test_step_serves_prefill_and_decode_together_as_apart",
    ),
    Mutation(
        11,
        "decode rows are taken four at a time, also where there is one",
        "pallas_kernels/sparse_mla/xla.py",
        "    block = math.gcd(rows, BLOCK_ROWS)\n",
        "    block = BLOCK_ROWS\n",
        "tests/model/test_golden.py::test_logits_and_greedy_tokens_equal_transformers",
    ),
    Mutation(
        13,
        "the page tables of groups are those of the first alone",
        "glm_jax/model/rows.py",
        "        group_page_table=slots.page_table[inputs.group_slot],\n",
        "        group_page_table=slots.page_table[inputs.group_slot[:1]],\n",
        TESTS + "test_every_array_of_the_sparse_path_has_the_padded_row_count",
    ),
    Mutation(
        14,
        "page tables are rounded down to whole pages",
        "glm_jax/engine/config.py",
        "        return -(-self.max_model_len // self.page_size)\n",
        "        return self.max_model_len // self.page_size\n",
        TESTS + "test_decodes_run_to_a_model_length_that_is_no_multiple_of_the_page",
    ),
)
