import json

import pytest

from fixtures.families import small_config
from hybridflow.cli.main import main
from hybridflow.models import shared_prompts
from hybridflow.trainers.family_check.check import LINES

OWN_RUN = pytest.mark.own_run("grpo: two processes compute a small copy")


@pytest.fixture
def config_of(tmp_path):
    """Return a function that writes config.json of a family, and returns its directory."""

    def write(kind):
        small_config(kind).save_pretrained(tmp_path)
        return str(tmp_path)

    return write


def test_the_command_prints_the_largest_difference_of_each_line(config_of, capsys):
    assert main(["check-model", config_of("llama")]) == 0
    first, header, *lines, bounds = capsys.readouterr().out.splitlines()
    assert first == "llama layers: LlamaAttention, LlamaMLP"
    assert header.split() == ["log-probs", "gradients"]
    assert [line.split("  ")[0] for line in lines] == [text.title for text in LINES.values()]
    assert {line.split()[-1] for line in lines} == {"ok"}
    assert bounds.split() == ["at", "most", "2.0e-04", "1.0e-03"]


def test_the_command_fails_with_the_line_the_kind_and_the_remedy(config_of, capsys, monkeypatch):
    monkeypatch.setattr(shared_prompts.SharedPromptPlan, "attend", lambda *_: 1 / 0)
    assert main(["check-model", config_of("llama"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [each for each in report["findings"] if not each["is_ok"]]
    assert [(each["title"], each["kind"]) for each in failed] == [
        ("prompts shared = rows alone", "LlamaAttention, LlamaMLP")
    ]
    assert failed[0]["difference"]["error"] == "ZeroDivisionError: division by zero"


def test_one_cause_of_all_lines_is_printed_once(config_of, capsys):
    assert main(["check-model", config_of("stablelm")]) == 1
    *table, cause = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in table].count("FAILED") == len(LINES)
    assert cause.startswith("all lines: ModelError: StableLmAttention was called without attention_plan")
    assert cause.endswith(
        "in layers of StableLmAttention, StableLmMLP; use another model, or other versions of transformers and torch."
    )


@pytest.mark.runs
@OWN_RUN
def test_two_ranks_are_compared_with_one(config_of, capsys):
    assert main(["check-model", config_of("qwen2"), "--ranks", "2", "--tensor", "2"]) == 0
    assert "2 ranks, tensor 2 = one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "3", "--expert", "3"), "parallel.expert=3 does not divide the 4 experts of this model"),
        (("--ranks", "65"), "--ranks 65 is out of range: expected at most 64 processes"),
    ],
)
def test_ranks_beyond_the_experts_or_the_machine_are_an_error_at_once(config_of, capsys, arguments, message):
    assert main(["check-model", config_of("qwen3_moe"), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@OWN_RUN
def test_as_many_experts_are_computed_as_the_ranks_divide(tmp_path, capsys):
    small_config("qwen3_moe", num_experts=6, num_local_experts=6).save_pretrained(tmp_path)
    assert main(["check-model", str(tmp_path), "--ranks", "3", "--expert", "3"]) == 0


@pytest.mark.exhaustive
@OWN_RUN
def test_a_layout_that_a_family_does_not_have_fails_the_check(config_of, capsys):
    assert main(["check-model", config_of("gpt2"), "--ranks", "2", "--tensor", "2"]) == 1
    assert "parallel.tensor=2 is not supported for gpt2 models" in capsys.readouterr().out


def test_ranks_that_the_layout_does_not_divide_are_an_error(config_of, capsys):
    assert main(["check-model", config_of("llama"), "--ranks", "3", "--tensor", "2"]) == 2
    assert "parallel.tensor=2 does not divide --ranks 3" in capsys.readouterr().err
