"""Arguments that several commands share."""

import argparse
from pathlib import Path

import pytest

from hybridflow.cli.checkpoint_arguments import add_checkpoint_arguments, chosen_checkpoint, recipe_of_run
from hybridflow.cli.main import COMMANDS, main
from hybridflow.cli.output_file import write_rows
from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of
from hybridflow.cli.stop_after import add_stop_after
from hybridflow.errors import ConfigError, DataError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[trainer]\nseed = 5\n")
    return path


def parse(*arguments, adders=(add_recipe_arguments, add_stop_after, add_checkpoint_arguments)):
    parser = argparse.ArgumentParser()
    for add in adders:
        add(parser)
    return parser.parse_intermixed_args([str(argument) for argument in arguments])


def test_options_can_stand_between_overrides(recipe):
    args = parse(recipe, "trainer.epochs=2", "--stop-after", "3", "trainer.log_samples=1")
    config = config_of(args)
    assert (config.trainer.seed, config.trainer.epochs, config.trainer.log_samples) == (5, 2, 1)
    assert args.stop_after == 3


def test_a_first_argument_with_an_equals_sign_is_an_override():
    assert config_of(parse("trainer.seed=7")).trainer.seed == 7
    assert config_of(parse()).trainer.seed == 0


def test_an_override_wins_over_an_option(recipe):
    config = config_of(parse("trainer.seed=7"), default_recipe=recipe, more=["trainer.seed=6", "trainer.epochs=4"])
    assert (config.trainer.seed, config.trainer.epochs) == (7, 4)


@pytest.mark.parametrize(
    ("argument", "override"),
    [
        ("--actor.optimizer.lr=1e-5", "actor.optimizer.lr=1e-5"),
        ("-trainer.seed=3", "trainer.seed=3"),
        ("--trainer.seed", "trainer.seed=VALUE"),
    ],
)
def test_an_override_with_dashes_shows_how_to_write_it(argument, override, recipe, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["config", str(recipe), argument, "4"])
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert f"{argument} is not an option: overrides are written without dashes: {override}\n" in shown


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_stop_after_must_be_a_positive_integer(text, capsys):
    with pytest.raises(SystemExit):
        parse(f"--stop-after={text}")
    assert f"N must be a positive integer, got {text!r}" in capsys.readouterr().err


def test_a_checkpoint_and_a_run_are_not_both_given(capsys):
    with pytest.raises(SystemExit):
        parse("--run", "a", "--checkpoint", "b")
    assert "not allowed with argument" in capsys.readouterr().err


def test_no_checkpoint_is_chosen_without_an_option():
    assert chosen_checkpoint(parse()) is None
    assert recipe_of_run(parse()) is None
    with pytest.raises(ConfigError, match="--step 4 needs a run; add --run DIR"):
        chosen_checkpoint(parse("--step", "4"))


def test_rows_replace_the_contents_of_a_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("old\n")
    write_rows(file, [{"a": 1}, {"b": "ü"}])
    assert file.read_text("utf-8") == '{"a": 1}\n{"b": "ü"}\n'
    with pytest.raises(DataError, match=r"--output .*absent/rows\.jsonl cannot be written"):
        write_rows(Path("absent/rows.jsonl"), [])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: hybridflow {command} " in shown
    assert f"example: hybridflow {COMMANDS[command].example}" in shown
