"""The command line without a model: usage, errors, exit codes."""

import pytest

from glm_jax.cli import main


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "generate" in capsys.readouterr().out


def test_generate_reports_a_user_error_in_one_line(capsys, tmp_path):
    assert main(["generate", "hello", "--model", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("glm-jax generate: ")
    assert error.count("\n") == 1


def test_generate_refuses_an_unknown_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello", "--max-num-seq", "3"])
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_generate_refuses_a_bad_sampling_value(capsys):
    assert main(["generate", "hello", "--top-p", "1.5"]) == 2
    assert "top_p is 1.5" in capsys.readouterr().err
