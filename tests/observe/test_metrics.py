"""Prometheus totals are those of the outputs and of the step log, in random lives."""

import pytest
from engine.fake_executor import Story
from observe.lives import Life
from observe.planted_log import CHUNK, PlantedLog

from glm_jax.engine.admission import QueueFullError
from glm_jax.engine.config import EngineConfig
from glm_jax.observe.metrics import Metrics, cell_name

LIVES = (
    {"num_pages": 60},
    {"num_pages": 60, "enable_prefix_caching": False},
    {"num_pages": 60, "num_speculative_tokens": 3},
    {"num_pages": 60, "num_speculative_tokens": 2, "enable_prefix_caching": False},
    {"num_pages": 60, "num_speculative_tokens": 2, "decode_loop_steps": 4},
    {"num_pages": 12, "num_speculative_tokens": 1},
)
OWN = {"model_name": "glm", "engine": "0"}


class Watched(Life):
    """A life with metrics."""

    def __init__(self, seed: int, **options) -> None:
        super().__init__(seed, **options)
        self.metrics = Metrics(self.story.config)
        self.story.engine.watches.append(self.metrics.add)

    def value(self, name: str, **labels) -> float:
        return value(self.metrics, name, **labels)


def value(metrics: Metrics, name: str, **labels) -> float:
    found = metrics.registry.get_sample_value(name, {**OWN, **labels})
    return 0.0 if found is None else found


def total(metrics: Metrics, name: str, **labels) -> float:
    """The sum over all labels but these."""
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize("options", LIVES)
def test_totals_are_those_of_the_outputs(options):
    for seed in range(4):
        life = Watched(seed, **options)
        names = life.live(8)
        outputs = [life.story.output(name) for name in names]
        completions = [output.outputs[0] for output in outputs]
        first = [one for one in outputs if one.outputs[0].token_ids]
        tokens = sum(len(one.token_ids) for one in completions)
        assert life.value("vllm:generation_tokens_total") == tokens
        prompts = sum(len(output.prompt_token_ids) for output in first)
        assert life.value("vllm:prompt_tokens_total") == prompts
        for reason in ("length", "stop", "abort"):
            ended = sum(one.finish_reason == reason for one in completions)
            assert life.value("vllm:request_success_total", finished_reason=reason) == ended
        assert life.value("vllm:time_to_first_token_seconds_count") == len(first)
        assert life.value("vllm:e2e_request_latency_seconds_count") == len(outputs)
        assert life.value("vllm:request_generation_tokens_sum") == tokens
        drafts = [output.drafts for output in outputs]
        assert life.value("vllm:spec_decode_num_drafts_total") == sum(d[0] for d in drafts)
        assert life.value("vllm:spec_decode_num_draft_tokens_total") == sum(d[1] for d in drafts)
        accepted = sum(d.accepted_tokens for d in drafts)
        assert life.value("vllm:spec_decode_num_accepted_tokens_total") == accepted
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert total(life.metrics, per_position) == accepted


@pytest.mark.parametrize("options", LIVES)
def test_totals_are_those_of_the_records(options):
    for seed in range(4):
        life = Watched(seed, **options)
        life.live(8)
        ran = [record for record in life.records if record.cell is not None]
        assert total(life.metrics, "glm_jax:step_total") == len(ran)
        for kind in ("prefill", "decode", "mixed"):
            steps = sum(record.kind == kind for record in ran)
            assert total(life.metrics, "glm_jax:step_total", kind=kind) == steps
        rows = {
            segment: life.value("glm_jax:step_rows_total", segment=segment)
            for segment in ("prefill", "decode", "draft", "pad")
        }
        useful = sum(record.prefill_rows + record.loop_rows for record in ran)
        assert rows["prefill"] + rows["decode"] + rows["draft"] == useful
        assert rows["pad"] == sum(record.pad_rows for record in ran)
        prefill = sum(rows.known for record in ran for rows in record.rows if rows.prefill)
        assert rows["prefill"] == prefill
        source = "vllm:prompt_tokens_by_source_total"
        assert life.value(source, source="local_compute") == prefill
        found = life.value("vllm:prefix_cache_hits_total")
        assert found == sum(record.cached_tokens for record in ran)
        assert life.value("vllm:prefix_cache_queries_total") >= found
        assert life.value("vllm:num_preemptions_total") == life.story.engine.scheduler.preemptions
        for record in ran:
            assert value(
                life.metrics,
                "glm_jax:step_seconds_count",
                kind=record.kind,
                cell=cell_name(record.cell),
            )
        declined = sum(note.count for record in ran for note in record.declined)
        assert total(life.metrics, "glm_jax:mixed_declined_total") == declined


def test_lives_reach_what_they_are_meant_to_test():
    seen = {"hits": 0.0, "preempted": 0.0, "accepted": 0.0, "aborted": 0.0, "looped": 0.0}
    for options in LIVES:
        for seed in range(4):
            life = Watched(seed, **options)
            life.live(8)
            seen["hits"] += life.value("vllm:prefix_cache_hits_total")
            seen["preempted"] += life.value("vllm:num_preemptions_total")
            seen["accepted"] += life.value("vllm:spec_decode_num_accepted_tokens_total")
            seen["aborted"] += life.value("vllm:request_success_total", finished_reason="abort")
            seen["looped"] += life.value("glm_jax:loop_steps_total")
    assert min(seen.values()) >= 4, seen


def test_times_of_the_outputs_are_those_of_the_histograms():
    life = Watched(3, num_pages=60)
    names = life.live(6)
    times = [life.story.output(name).times for name in names]
    ended = [one for one in times if one.first_token is not None]
    waits = sum(one.scheduled - one.arrival for one in times if one.scheduled is not None)
    assert life.value("vllm:request_queue_time_seconds_sum") == pytest.approx(waits, rel=1e-6)
    # The output's moment is that of its delta, the histogram's the end of the step.
    first = sum(one.first_token - one.arrival for one in ended)
    assert life.value("vllm:time_to_first_token_seconds_sum") == pytest.approx(first, abs=0.2)
    for one in ended:
        assert one.arrival <= one.scheduled <= one.first_token <= one.last_token


def test_several_completions_are_requests_of_one_prompt():
    story = Story(num_pages=60)
    metrics = Metrics(story.config)
    story.engine.watches.append(metrics.add)
    story.add("many", [1, 2, 3, 4, 5], n=3, max_tokens=4, ignore_eos=True)
    while story.engine.has_unfinished:
        story.engine.step()
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 3
    assert value(metrics, "vllm:request_params_n_sum") == 3
    assert value(metrics, "vllm:request_params_n_count") == 1
    assert value(metrics, "vllm:generation_tokens_total") == 12


def test_gauges_are_of_the_last_step():
    story = Story(max_num_seqs=1)
    metrics = Metrics(story.config)
    story.engine.watches.append(metrics.add)
    for name in ("a", "b", "c"):
        story.add(name, [1, 2, 3], max_tokens=4)
    story.step()
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    # One page of 12 (one slot of 48 tokens, pages of 4).
    assert value(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(1 / 12)


def test_a_refused_request_is_counted():
    story = Story(max_queued_requests=1)
    metrics = Metrics(story.config)
    story.engine.watches.append(metrics.add)
    story.add("first", [1], max_tokens=1)
    with pytest.raises(QueueFullError):
        story.add("second", [1], max_tokens=1)
    story.step()
    assert value(metrics, "vllm:admission_rejections_total", reason="queue full") == 1


def test_a_fault_is_counted_by_its_phase():
    def hook(phase, plan):
        if phase == "dispatch" and story.engine.steps == 1:
            raise RuntimeError("boom")

    story = Story(hook=hook)
    metrics = Metrics(story.config)
    story.engine.watches.append(metrics.add)
    story.add("q", [1, 2], max_tokens=4)
    story.finish()
    assert value(metrics, "glm_jax:faults_total", phase="dispatch") == 1
    assert total(metrics, "glm_jax:step_total") == len(story.records) - 1


def test_interference_is_a_mixed_steps_time_above_the_usual_decode_step():
    log = PlantedLog(0)
    metrics = Metrics(EngineConfig())
    log.chunks(1)
    log.decode(40)
    log.chunks(10)
    for record in log.records:
        metrics.add(record)
    # The first chunk came before there was a decode step to compare with.
    name, bucket = "glm_jax:prefill_interference_seconds", {"prefill_bucket": str(CHUNK)}
    assert value(metrics, f"{name}_count", **bucket) == 10
    mean = value(metrics, f"{name}_sum", **bucket) / 10
    assert mean == pytest.approx(log.mixing_cost(), rel=0.05)
    assert value(metrics, "glm_jax:decode_latency_seconds_count", prefill_bucket="0") == 40
    assert value(metrics, "glm_jax:decode_latency_seconds_count", **bucket) == 11


def test_steps_that_are_not_full_are_counted_with_their_reason():
    log = PlantedLog(0)
    metrics = Metrics(EngineConfig())
    log.decode(2, mode="PIECEWISE")
    for record in log.records:
        metrics.add(record)
    assert value(metrics, "glm_jax:grid_miss_total", reason="cell not compiled yet") == 2
    labels = {"kind": "decode", "cell": "0x8x1", "mode": "PIECEWISE"}
    assert value(metrics, "glm_jax:step_total", **labels) == 2


def test_programs_are_counted_by_source():
    metrics = Metrics(EngineConfig())
    metrics.compiled("P=64 G=8 Q=1", "compiled", 3.5)
    metrics.compiled("P=0 G=8 Q=1", "loaded", 0.5)
    assert value(metrics, "glm_jax:compile_events_total", source="compiled") == 1
    name = "glm_jax:grid_cell_compile_seconds"
    assert value(metrics, name, cell="P=64 G=8 Q=1", source="compiled") == 3.5


def test_two_engines_in_a_process_have_metrics_of_their_own():
    one, other = (Metrics(EngineConfig(), engine=number) for number in ("0", "1"))
    one.compiled("x", "compiled", 1.0)
    assert value(other, "glm_jax:compile_events_total", source="compiled", engine="1") == 0
    assert b'engine="1"' in other.page()
    assert b"vllm:num_requests_running" in one.page()
    assert value(one, "glm_jax:grid_cells") == len(EngineConfig().grid().cells())
