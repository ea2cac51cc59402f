"""What the control lines are told, step by step: on the fake device, which checks every count."""

from collections.abc import Sequence
from random import Random

import pytest
from engine.harness import THINK, Loop, prompt_of

from glm_jax.sampling.control_update import IN_PROMPT, NO_TOKEN, UPDATE_LINES, UPDATE_TOKENS

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (4, 16),
    "group_buckets": (1, 4),
    "watermark": 0.0,
}
K = 3


class Told(Loop):
    """A loop that keeps the updates of every step.

    Attributes:
        updates: A list per step.
    """

    def __init__(self, **options) -> None:
        super().__init__(**{**OPTIONS, **options})
        self.updates: list[Sequence] = []
        write = self.controls.updates

        def noting(plan):
            self.updates.append(write(plan))
            return self.updates[-1]

        self.controls.updates = noting

    def ask(self, name: str, length: int = 6, **params) -> None:
        options = {"max_tokens": 12, "ignore_eos": True, "seed": 4, **params}
        self.add(name, prompt_of(Random(name), length), **options)

    def lines(self, update) -> list[int]:
        """The lines that an update starts or clears."""
        return [slot for slot in update.line_slot[0].tolist() if slot < self.config.max_num_seqs]

    def counted(self, update) -> int:
        """The counts that it changes."""
        return int((update.count_slot < self.config.max_num_seqs).sum())

    def end(self) -> None:
        self.finish()
        for name in self.requests:
            self.check_tokens(name)
        self.check_idle()


def test_a_step_without_users_has_no_update():
    loop = Told()
    loop.ask("plain", min_tokens=3, stop_token_ids=[5])
    loop.ask("warm", temperature=0.5, top_k=3)
    loop.end()
    assert {len(updates) for updates in loop.updates} == {0}


def test_a_line_is_told_when_its_request_first_samples_and_then_only_what_is_new():
    loop = Told(num_speculative_tokens=K)
    loop.ask("user", 40, frequency_penalty=1.0)
    loop.end()
    chunks = sum(plan.kind == "prefill" for plan in loop.plans)
    assert chunks == 3
    assert [len(updates) for updates in loop.updates] == [0, 0, *[1] * (len(loop.plans) - 2)]
    first, *rest = (updates[0] for updates in loop.updates[2:])
    assert loop.lines(first) == [0]
    marks = first.count_more[0, : loop.counted(first)].tolist()
    assert marks == [IN_PROMPT] * len(set(prompt_of(Random("user"), 40)))
    assert [loop.lines(update) for update in rest] == [[]] * len(rest)
    # The last step's tokens are never told.
    last = len(loop.outputs["user"]) - sum(map(loop.counted, rest))
    assert 1 <= last <= 1 + K


def test_a_bias_is_told_once():
    loop = Told()
    loop.ask("user", logit_bias={3: 1.0}, allowed_token_ids=[3, 4, 5], bad_words=[[4]])
    loop.end()
    assert [len(updates) for updates in loop.updates] == [1] + [0] * (len(loop.plans) - 1)
    (update,) = loop.updates[0]
    used = update.bias_slot[0] == 0
    told = zip(
        update.bias_token[0, used].tolist(), update.bias_value[0, used].tolist(), strict=True
    )
    assert dict(told) == {3: 1.0, 4: -float("inf"), 5: 0.0}
    assert update.line_bias[0, 0] == -float("inf")


def test_the_next_request_of_a_slot_without_controls_clears_the_line_once():
    loop = Told(max_num_seqs=1)
    loop.ask("user", presence_penalty=1.0, max_tokens=3)
    loop.ask("plain", max_tokens=4)
    loop.end()
    per_step = [len(updates) for updates in loop.updates]
    assert per_step == [1, 1, 1, 1, 0, 0, 0]
    (clearing,) = loop.updates[3]
    assert loop.lines(clearing) == [0]
    assert not clearing.line_active[0, 0]


def test_the_next_request_of_a_slot_with_controls_of_its_own_starts_anew():
    loop = Told(max_num_seqs=1)
    loop.ask("first", presence_penalty=1.0, allowed_token_ids=list(range(40)), max_tokens=3)
    loop.ask("second", repetition_penalty=1.2, max_tokens=4)
    loop.end()
    started = [loop.lines(update) for updates in loop.updates for update in updates]
    assert started == [[0], [], [], [0], [], [], []]


def test_a_word_that_the_prompt_begins_may_be_completed():
    loop = Told()
    loop.ask("plain")
    loop.end()
    prompt, drawn = prompt_of(Random("plain"), 6), loop.outputs["plain"]
    words = [[prompt[-1], drawn[0]], [prompt[-2], prompt[-1], drawn[0]], [drawn[0], drawn[1]]]
    loop.add("user", prompt, max_tokens=12, ignore_eos=True, seed=4, bad_words=words)
    loop.end()
    assert loop.outputs["user"][0] == drawn[0]
    assert loop.outputs["user"][1] != drawn[1]


def test_words_are_banned_behind_the_draft_that_begins_them():
    loop = Told(num_speculative_tokens=K)
    loop.ask("plain")
    loop.end()
    drawn = loop.outputs["plain"]
    words = [drawn[n : n + 2] for n in range(1, 11)]
    prompt = prompt_of(Random("plain"), 6)
    loop.add("user", prompt, max_tokens=12, ignore_eos=True, seed=4, bad_words=words)
    loop.end()
    banned = [
        row
        for updates in loop.updates
        for update in updates
        for row in range(1, K + 1)
        if update.row_slot[0, 0] == 0 and update.row_bans[0, 0, row, 0] != NO_TOKEN
    ]
    assert banned


def test_a_prompt_of_many_tokens_takes_several_calls(monkeypatch):
    monkeypatch.setattr("glm_jax.sampling.control_changes.UPDATE_TOKENS", 5)
    loop = Told()
    loop.ask("user", 16, repetition_penalty=1.5)
    loop.end()
    told = [loop.counted(update) for update in loop.updates[0]]
    assert sum(told) == len(set(prompt_of(Random("user"), 16)))
    assert len(told) > 2
    assert set(told[:-1]) == {5}


def test_more_new_lines_than_a_call_takes_come_before_their_tokens(monkeypatch):
    monkeypatch.setattr("glm_jax.sampling.control_changes.UPDATE_LINES", 1)
    loop = Told()
    for name in "abcd":
        loop.ask(name, 3, repetition_penalty=1.5, bad_words=[[3, 4]])
    loop.end()
    calls = loop.updates[0]
    assert [len(loop.lines(update)) for update in calls] == [1, 1, 1, 1]
    assert [loop.counted(update) > 0 for update in calls] == [False, False, False, True]


def test_a_request_that_comes_back_to_its_line_is_told_only_what_is_new():
    loop = Told(num_pages=7, scheduling_policy="priority")
    loop.ask("user", 7, frequency_penalty=0.5, max_tokens=14, priority=1)
    loop.step()
    loop.ask("first", 7, max_tokens=14)
    loop.end()
    assert loop.requests["user"].preemptions
    started = [
        slot for updates in loop.updates for update in updates for slot in loop.lines(update)
    ]
    assert started == [0]


def test_a_lost_device_is_told_everything_again():
    loop = Told()
    loop.ask("user", frequency_penalty=0.5, thinking_token_budget=3)
    for _ in range(4):
        loop.step()
    loop.lose_pool()
    loop.end()
    started = [bool(loop.lines(update)) for updates in loop.updates for update in updates]
    assert started == [True, False, False, False, True, *[False] * (len(started) - 5)]


def test_rows_are_told_only_when_they_change():
    loop = Told()
    # Never inside a thinking part, so nothing is ever forced.
    loop.ask("user", thinking_token_budget=3, bad_words=[list(THINK)])
    loop.end()
    told = sum(len(updates) for updates in loop.updates)
    assert told <= 1 + 2 * loop.outputs["user"].count(THINK[0])


def test_the_end_is_forced_behind_the_draft_that_uses_up_the_budget():
    loop = Told(num_speculative_tokens=K)
    start, end = THINK
    prompt = [1, 2, start]
    loop.add("user", prompt, max_tokens=12, ignore_eos=True, seed=1, thinking_token_budget=2)
    loop.end()
    assert loop.outputs["user"][2] == end
    first, second = (updates[0].row_force[0, 0].tolist() for updates in loop.updates[:2])
    assert first == [NO_TOKEN] * (K + 1)
    # One token is known; no draft behind the second one can be right but the end.
    assert loop.plans[1].entries[0].drafts == K
    assert second == [NO_TOKEN, end, end, end]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"presence_penalty": 1.0}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"bad_words": [[1, 2]]}, "bad words of several tokens"),
        ({"thinking_token_budget": 9}, "thinking budget"),
        ({"logit_bias": {3: 1}, "bad_words": [[1]], "allowed_token_ids": [1, 3, 4]}, ""),
    ],
)
def test_a_request_that_follows_its_tokens_keeps_steps_single(params, reason):
    loop = Told(decode_loop_steps=5)
    loop.ask("user", **params)
    loop.step()
    plan = loop.schedule_and_run()
    assert (plan.loop_reason, plan.loop_steps > 1) == (reason, not reason)
    loop.end()


def test_what_a_call_takes_is_enough_for_any_step_of_drafts():
    # One call a step: every request of a large engine, each with a group of accepted drafts.
    assert UPDATE_TOKENS >= 128 * 6
    assert UPDATE_LINES >= 8
