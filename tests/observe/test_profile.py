"""A profile of a few steps: a trace with the number of each, and nothing of the others."""

import gzip
import json
from contextlib import closing

import pytest
from engine.fake_executor import Story

import glm_jax
from glm_jax.cli import main
from glm_jax.observe.observer import Observer
from glm_jax.observe.profile import MARK, Profile


def story_with(profile) -> Story:
    story = Story()
    story.engine.watches.append(profile.add)
    story.add("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    return story


def marks(folder) -> list[tuple[int, float]]:
    """Step numbers and milliseconds of the marks in the one trace of a folder."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    assert list(path.parent.glob("*.xplane.pb"))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    chosen = [event for event in events if event.get("name") == MARK]
    return [(int(event["args"]["step_num"]), event["dur"] / 1e3) for event in chosen]


def test_a_profile_is_an_observer(tmp_path):
    assert isinstance(Profile(tmp_path, steps=1), Observer)


def test_the_steps_after_the_first_are_marked_with_their_numbers(tmp_path):
    profile = Profile(tmp_path, steps=4)
    story = story_with(profile)
    story.step()
    assert profile.running
    story.finish()
    assert (profile.captured, profile.running) == (4, False)
    found = marks(tmp_path)
    assert [number for number, _ in found] == [1, 2, 3, 4]
    # A mark holds its step.
    for number, milliseconds in found:
        assert milliseconds >= story.records[number].wall_time * 1e3 * 0.95


def test_a_profile_that_is_closed_early_has_what_there_was(tmp_path):
    with closing(Profile(tmp_path, steps=100)) as profile:
        story_with(profile).finish()
    assert not profile.running
    assert profile.captured == 11
    # The mark of a step that never came is there too.
    assert [number for number, _ in marks(tmp_path)][:11] == list(range(1, 12))


def test_steps_without_work_do_not_count(tmp_path):
    with closing(Profile(tmp_path, steps=2)) as profile:
        story = Story()
        story.engine.watches.append(profile.add)
        for _ in range(5):
            story.step()
        assert (profile.captured, profile.running) == (0, True)


def test_no_steps_means_no_trace(tmp_path):
    with closing(Profile(tmp_path, steps=3)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_steps_to_capture_are_refused(tmp_path):
    with pytest.raises(ValueError, match="profile steps is 0; allowed: an integer >= 1"):
        Profile(tmp_path, steps=0)


class FakeLLM:
    """Runs a story for one prompt."""

    tokenizer = None

    def __init__(self, model, **options) -> None:
        self.story = Story()

    def watch(self, observer) -> None:
        self.story.engine.watches.append(observer.add)

    def stream(self, prompts, params):
        self.story.add("a", [1, 2, 3], max_tokens=6, ignore_eos=True)
        while self.story.engine.has_unfinished:
            for delta in self.story.step().deltas:
                yield 0, delta


def test_generate_profiles_the_steps_that_it_is_told_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(glm_jax, "LLM", FakeLLM)
    assert main(["generate", "x", "--profile", str(tmp_path), "--profile-steps", "3"]) == 0
    assert len(capsys.readouterr().out.split()) == 6
    assert [number for number, _ in marks(tmp_path)] == [1, 2, 3]
