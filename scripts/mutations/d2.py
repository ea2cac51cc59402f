"""Pads and memory that nobody owns."""

from scripts.mutations.mutation import Mutation

TESTS = "tests/catalogue/test_d2_pads.py::"

PADS = (
    Mutation(
        15,
        "a row that attends to nothing is divided by nothing",
        "pallas_kernels/sparse_mla/xla.py",
        "        weights /= jnp.where(total > 0, total, 1.0)\n",
        "        weights /= total\n",
        TESTS + "test_pad_rows_compute_finite_numbers",
    ),
    Mutation(
        16,
        "all rows of a step share the scale of an FP8 tile",
        "pallas_kernels/fp8/scaled_tiles.py",
        "_power_of_two_scales(jnp.max(magnitudes, axis=-1), floor)",
        """_power_of_two_scales(
            jnp.broadcast_to(jnp.max(magnitudes), magnitudes.shape[:-1]), floor
        )""",
        "tests/model/test_fp8_cache.py::test_fp8_cache_has_the_same_bits_whatever_pads_hold",
    ),
    Mutation(
        17,
        "what is to be dropped has index -1",
        "bucketing/step_inputs.py",
        "        return self.max_num_seqs + 1\n",
        "        return -1\n",
        "tests/engine/test_padding.py::"
        "test_outputs_are_bit_identical_whatever_stands_in_what_nobody_owns",
    ),
    Mutation(
        18,
        "pads write the first entry of the reserved page",
        "glm_jax/model/rows.py",
        "jnp.where(valid, page * page_size + positions % page_size, pool_entries)",
        "jnp.where(valid, page * page_size + positions % page_size, 0)",
        TESTS + "test_the_reserved_page_keeps_its_bits_over_100_random_steps",
    ),
    Mutation(
        19,
        "pads reach experts",
        "glm_jax/model/moe.py",
        "jnp.where(valid[:, None], chosen, config.n_routed_experts)",
        "chosen",
        "tests/engine/test_expert_load.py::"
        "test_every_useful_row_reaches_as_many_experts_as_the_model_says",
    ),
    Mutation(
        20,
        "every row of a group is read, whatever was accepted",
        "glm_jax/engine/results.py",
        "        tokens = draws[first : first + count + 1]\n",
        "        tokens = draws[first:]\n",
        TESTS + "test_a_step_with_drafts_answers_its_live_requests_only",
    ),
)
