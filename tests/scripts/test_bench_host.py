"""The host benchmark on a few steps: its numbers are for people, its form is for programs."""

import json

from scripts import bench_host


def test_bench_host_prints_one_json_object(capsys, monkeypatch):
    arguments = ["bench_host", "--model", "tiny-random", "--groups", "2", "--steps", "5", "--json"]
    monkeypatch.setattr("sys.argv", arguments)
    bench_host.main()
    result = json.loads(capsys.readouterr().out)
    assert (result["groups"], result["steps"]) == (2, 5)
    phases = result["phases"]
    assert {*bench_host.HOST_PHASES, "host total"} <= phases.keys()
    for row in phases.values():
        assert 0 <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert phases["host total"]["median_ms"] <= phases["whole step"]["p90_ms"]
