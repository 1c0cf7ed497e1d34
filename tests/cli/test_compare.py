"""`hybridflow compare`: what is printed about two runs."""

import json

import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.main import main


@pytest.fixture
def runs(tmp_path):
    for name, steps, seed in (("short", 3, 0), ("long", 8, 1)):
        write_run(tmp_path / name, steps=steps, seed=seed)
    return tmp_path


def output_of(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_two_runs_are_compared(capsys, runs):
    (runs / "short" / "metrics.jsonl").write_text(
        '{"step": 1, "actor/loss": 0.5, "actor/lr": 1, "timing_s/step": 2}\n'
        '{"step": 2, "actor/loss": 0.25, "actor/lr": 1, "timing_s/step": 2}\n'
    )
    (runs / "long" / "metrics.jsonl").write_text(
        '{"step": 1, "actor/loss": 0.5, "actor/lr": 1, "timing_s/step": 2}\n'
        '{"step": 2, "actor/loss": 0.5, "actor/lr": 1, "timing_s/step": 3, "val/x": 2}\n'
        '{"step": 3}\n'
    )
    text = output_of(capsys, "compare", runs / "short", runs / "long", "--times")
    assert text == (
        f"A: {runs}/short, to step 2\n"
        f"B: {runs}/long, to step 3\n"
        "\n"
        "configuration: 2 differ\n"
        "                     A  B\n"
        "trainer.seed         0  1\n"
        "trainer.total_steps  3  8\n"
        "\n"
        "environment: the same\n"
        "\n"
        "prompts: the same in all common steps\n"
        "\n"
        "curves, all 2 common steps, 1 to 2: 1 differ, 1 the same\n"
        "            from step  largest difference  last A  last B  mean A  mean B\n"
        "actor/loss          2                0.25    0.25     0.5   0.375     0.5\n"
        "only in B: val/x\n"
        "\n"
        "times, memory and transfers:\n"
        "               from step  largest difference  last A  last B  mean A  mean B\n"
        "timing_s/step          2                   1       2       3       2     2.5\n"
    )


def test_a_pattern_chooses_metrics_in_both_formats(capsys, runs):
    a, b = runs / "short", runs / "long"
    for run, loss in ((a, 1.0), (b, 2.0)):
        row = {"step": 1, "actor/loss": loss, "critic/loss": loss, "actor/lr": 1e-5}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for pattern, names in {"loss": ["actor/loss", "critic/loss"], "a*r/l": ["actor/loss"], "lr": []}.items():
        found = json.loads(output_of(capsys, "compare", a, b, "--json", "--metric", pattern))
        assert [curve["name"] for curve in found["curves"]] == names
    assert "\ncurves: 1 the same in all 1 common steps, 1 to 1\n" in output_of(capsys, "compare", a, b, "--metric=lr")
    assert "no common metric whose name contains 'kl'" in output_of(capsys, "compare", a, b, "--metric", "kl")


def test_a_run_equals_itself(capsys, runs):
    text = output_of(capsys, "compare", runs / "short", runs / "short", "--times")
    assert "configuration: the same" in text
    assert text.endswith("\ncurves: 1 the same in all 3 common steps, 1 to 3\n")


def test_data_and_models_are_compared_where_they_are_recorded(capsys, runs):
    for run, digest in (("short", "12"), ("long", "34")):
        document = json.loads((runs / run / "run.json").read_text())
        document["starts"][0] |= {"data": {"train_rows": 9, "train_fingerprint": digest}, "models": {"model.path": "a"}}
        (runs / run / "run.json").write_text(json.dumps(document))
    text = output_of(capsys, "compare", runs / "short", runs / "long")
    assert "data and initial models: 1 differ\n" in text
    assert 'data.train_fingerprint  "12"  "34"\n' in text
    assert "data and initial models: the same\n" in output_of(capsys, "compare", runs / "long", runs / "long")


def test_runs_without_a_common_step_are_compared(capsys, runs):
    (runs / "long" / "metrics.jsonl").write_text('{"step": 77, "critic/score/mean": 1.0}\n')
    assert "the runs have no common step" in output_of(capsys, "compare", runs / "short", runs / "long")
    (runs / "long" / "metrics.jsonl").unlink()
    assert "B: " + f"{runs}/long, to step 0" in output_of(capsys, "compare", runs / "short", runs / "long")


def test_what_is_not_a_run_is_an_error(capsys, runs):
    (runs / "file").write_text("")
    for path in (runs, runs / "file", runs / "missing"):
        assert main(["compare", str(runs / "short"), str(path)]) == 2
        assert f"error: '{path}' is not the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", "{", "run.json' is damaged"),
        ("run.json", '{"starts": []}', "has no start of a run"),
        ("run.json", '{"starts": [{}]}', "has no configuration"),
        ("metrics.jsonl", "[1]\n", "line 1: '[1]' is not a JSON object"),
        ("metrics.jsonl", '{"x": 1}\n', "line 1: the row has no integer step"),
        ("metrics.jsonl", '{"step": 1, "non_finite": 3}\n', "line 1: 'non_finite' is damaged"),
        ("metrics.jsonl", '{"step": 1, "non_finite": {"x": "y"}}\n', "line 1: 'non_finite' is damaged"),
        ("metrics.jsonl", '{"step": 1}\n{"step"\n', "line 2: not valid JSON"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(capsys, runs, file, text, message):
    (runs / "long" / file).write_text(text)
    assert main(["compare", str(runs / "short"), str(runs / "long")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(runs / "long" / file) in error


def test_values_that_a_terminal_or_a_float_cannot_hold_are_shown_as_text(capsys, runs):
    document = json.loads((runs / "long" / "run.json").read_text())
    document["starts"][0]["config"] |= {"trainer.run_dir": "\x1b[2J\x9b\u202e\ud800", "long": "x" * 99}
    (runs / "long" / "run.json").write_text(json.dumps(document))
    for run, values in (("short", '1, "y": 1, "z": null'), ("long", f'1{"0" * 400}, "y": 1e999, "z": 1')):
        (runs / run / "metrics.jsonl").write_text(f'{{"step": 1, "x\\u001b": {values}}}\n')
    text = output_of(capsys, "compare", runs / "short", runs / "long")
    assert r'"\u001b[2J\x9b\u202e\ud800"' in text
    assert f'"{"x" * 56}...' in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["x\\x1b", "1", "inf", "1", "inf", "1", "nan"],
        ["y", "1", "inf", "1", "inf", "1", "nan"],
        ["z", "1", "inf", "-", "1", "nan", "1"],
    ]
    assert json.loads(output_of(capsys, "compare", runs / "short", runs / "long", "--json"))["num_equal"] == 0
