"""`glm-jax ledger`: the seed's account by one command; nothing is compiled."""

import csv
import io
import json

import pytest

from glm_jax.cli import main


def ledger(capsys, *arguments):
    assert main(["ledger", *arguments]) == 0
    return capsys.readouterr().out


def test_it_prints_the_accounts_and_what_is_published_wrongly(capsys):
    text = ledger(capsys)
    for words in (
        "753.3e9 parameters",
        "656 bytes a latent, 132 an index key, 53,940 a token",
        "sparse MLA, chunks",
        "mixed / (prefill + decode) = 0.809",
        "who pays for the mixed step",
        "2.12 GB",
        "92.72 GB",
        "43.67",
        "14.68 M",
        "28 MB / 92.7 GB, 3300 times",
    ):
        assert words in text, words


def test_json_has_every_stage_of_every_account(capsys):
    content = json.loads(ledger(capsys, "--json"))
    assert content["model"]["parameters"] == 753_329_940_480
    assert content["model"]["tensors"]["fp8"] == 118_629
    assert content["cache_bytes"]["token"] == 53_940
    assert list(content["accounts"]) == ["decode", "prefill", "mixed"]
    mixed = content["accounts"]["mixed"]
    assert mixed["rows"] == 8384
    stages = {(one["part"], one["stage"]): one for one in mixed["stages"]}
    assert stages["sparse layer", "routed experts"]["bound"] == "compute"
    total = sum(one["layers"] * one["floor_seconds"] for one in mixed["stages"])
    assert mixed["total"]["seconds"] == pytest.approx(total)
    assert content["hardware"]["memory"] == 4.3e12
    assert content["who_pays"][0]["rule"] == "by rows"


def test_csv_has_a_line_for_every_stage(capsys):
    lines = list(csv.DictReader(io.StringIO(ledger(capsys, "--csv", "--decode", "4"))))
    assert {line["account"] for line in lines} == {"decode", "prefill", "mixed"}
    assert all(line["formula"] for line in lines)
    assert float(lines[0]["rows" if "rows" in lines[0] else "count"]) > 0


def test_one_kind_of_rows_is_one_account(capsys):
    text = ledger(capsys, "--prefill", "0", "--layout", "one", "--formulas")
    assert "decode step, busiest device" in text
    assert "who pays" not in text
    assert "weights read once" in text


def test_pads_of_a_cell_are_counted(capsys):
    useful = json.loads(ledger(capsys, "--json", "--decode", "20"))
    padded = json.loads(ledger(capsys, "--json", "--decode", "20", "--cell", "8192,32,6"))
    operations = [one["accounts"]["mixed"]["total"]["operations"] for one in (useful, padded)]
    assert operations[0] < operations[1]
    assert padded["step"]["cell"] == [8192, 32, 6]


def test_it_draws_a_picture(capsys, tmp_path):
    path = tmp_path / "ledger.png"
    assert "drawn" in ledger(capsys, "--png", str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_cpu_is_probed_and_has_no_link(capsys):
    arguments = ("--json", "--hardware", "cpu", "--layout", "one", "--preset", "tiny-random")
    arguments += ("--weight-dtype", "float32", "--kv-cache-dtype", "float32")
    content = json.loads(ledger(capsys, *arguments, "--prefill", "64", "--context", "1000"))
    assert content["hardware"]["link"] is None
    assert content["hardware"]["memory"] > 1e8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill", "-1"), "prefill is -1; allowed: 0 or more"),
        (("--context", "2000000"), "the model's positions end at 1048576"),
        (("--cell", "8192x32"), "cell is '8192x32'; allowed: prefill rows"),
        (("--layout", "ring"), "layout is 'ring'"),
        (("--prefill", "0", "--decode", "0"), "the step has no rows"),
        (("--preset", "tiny-random", "--prefill", "9", "--context", "99"), "a multiple of 128"),
    ],
)
def test_wrong_options_are_one_line(capsys, arguments, message):
    assert main(["ledger", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
