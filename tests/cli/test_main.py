"""The command line: help, exit status, errors and signals, and the arguments that several commands share."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow import __version__
from hybridflow.cli.arguments import add_recipe_arguments, add_stop_after, config_of
from hybridflow.cli.checkpoint_arguments import add_checkpoint_arguments, config_and_checkpoint
from hybridflow.cli.exit_codes import exit_codes_text
from hybridflow.cli.main import COMMANDS, Command, main, module_of
from hybridflow.cli.output import write_rows
from hybridflow.config import leaf_keys, load_config, reference_markdown, reference_text, to_toml
from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError, DataError, LostWeightSyncError, WorkerDiedError, WorkerError

DOCS = Path(__file__).parents[2] / "docs"
RECIPE = str(Path(__file__).parents[2] / "recipes/algorithms/grpo.toml")


@pytest.fixture
def fake_command(monkeypatch):
    """Add a command `fake` whose `run` is the given function."""

    def add(run):
        module = type(sys)("fake_command")
        module.__doc__ = "Does something fake.\n\nIn two paragraphs."
        module.add_arguments = lambda parser: parser.add_argument("word", nargs="?")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "hybridflow.cli.fake", module)
        monkeypatch.setitem(COMMANDS, "fake", Command("do something fake", "fake it"))

    return add


def fail_with(error, cause=None):
    def run(args):
        raise error from cause

    return run


def test_help_lists_every_command_and_exit_status(shown):
    out, _ = shown("--help")
    for name, command in COMMANDS.items():
        assert f"  {name} " in out
        assert command.help in out
        assert f"hybridflow {command.example}" in out
    assert f"exit status:\n{exit_codes_text()}\n" in out
    assert "commands:" in shown(status=2)[0]
    assert shown("--version")[0] == f"hybridflow {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example_and_its_keys(name, shown):
    out, _ = shown(name, "--help")
    assert f"usage: hybridflow {name} " in out
    assert f"example: hybridflow {COMMANDS[name].example}" in out
    keys = getattr(module_of(name), "KEYS", ())
    assert set(keys) <= leaf_keys().keys()
    assert all(f"\n  {key} = {toml_value(leaf_keys()[key])}\n" in out for key in keys)
    assert max(map(len, out.splitlines())) <= 120


def test_an_unknown_command_suggests_the_nearest_or_lists_all(shown):
    assert "'trian' is not a command; did you mean train?" in shown("trian", "recipe.toml", status=2)[1]
    assert f"commands: {', '.join(COMMANDS)}." in shown("xyz", status=2)[1]


def test_a_command_gets_its_arguments_and_its_status_is_returned(fake_command, shown):
    fake_command(lambda args: {"it": 5}[args.word])
    shown("fake", "it", status=5)
    out, _ = shown("fake", "--help")
    assert "In two paragraphs." in out


@pytest.mark.parametrize(
    ("error", "cause", "status", "printed"),
    [
        (DataError("data.parquet is empty"), None, 1, "error: data.parquet is empty\n"),
        (LostWeightSyncError("process 7 exited"), OSError("of a worker"), 75, "error: process 7 exited\n"),
        (KeyboardInterrupt(), None, 130, "interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(fake_command, shown, error, cause, status, printed):
    fake_command(fail_with(error, cause))
    assert shown("fake", status=status)[1].startswith(printed)
    assert "Traceback" not in shown("fake", status=status)[1]


def test_an_unexpected_error_shows_its_traceback(fake_command, shown):
    fake_command(lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["fake"])
    fake_command(fail_with(WorkerError("Actor.update failed: ZeroDivisionError"), ZeroDivisionError()))
    err = shown("fake", status=1)[1]
    assert err.startswith(("ZeroDivisionError", "Traceback"))
    assert err.endswith("error: Actor.update failed: ZeroDivisionError\n")


def test_status_75_ends_with_the_hint_of_the_command(fake_command, shown, monkeypatch):
    fake_command(fail_with(WorkerDiedError("worker actor/0 died")))
    monkeypatch.setattr(
        sys.modules["hybridflow.cli.fake"], "how_to_go_on", lambda args: f"Run {args.word}.", raising=False
    )
    assert shown("fake", "it", status=75)[1] == "error: worker actor/0 died\nRun it.\n"


def test_an_interrupt_that_became_another_error_is_still_one(fake_command, shown):
    def run(args):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:  # as an import does that a library makes lazily
            raise ModuleNotFoundError("could not import") from error

    fake_command(run)
    assert shown("fake", status=130)[1] == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_sigterm_acts_as_ctrl_c_unless_the_program_handles_it(fake_command, shown):
    handler = signal.getsignal(signal.SIGTERM)
    fake_command(lambda args: os.kill(os.getpid(), signal.SIGTERM) or 0)
    assert shown("fake", status=130)[1] == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == handler
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append("own handler"))
    try:
        shown("fake")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert seen == ["own handler"]


def test_lost_output_is_an_error_unless_a_run_has_files_or_the_reader_left(fake_command, monkeypatch, capfd):
    def status(path):
        with open(path, "w") if isinstance(path, str) else open(path, "w", closefd=False) as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            return main(["fake"])

    done = []
    fake_command(lambda args: print("x" * 10**5) or done.append(args) or 0)
    read_end, write_end = os.pipe()
    os.close(read_end)
    assert (status(write_end), capfd.readouterr().err) == (0, "")
    assert (status("/dev/full"), capfd.readouterr().err) == (75, "error: [Errno 28] No space left on device\n")
    monkeypatch.setattr(sys.modules["hybridflow.cli.fake"], "how_to_go_on", lambda args: "", raising=False)
    assert status("/dev/full") == 0
    assert "the files of the run have everything" in capfd.readouterr().err
    assert len(done) == 3
    os.close(write_end)


@pytest.mark.runs
@pytest.mark.own_run("grpo: looks at the output of a process")
def test_a_closed_pipe_a_full_disk_and_debugging(tmp_path):
    command = [sys.executable, "-m", "hybridflow", "config"]
    done = subprocess.run(
        f"{' '.join(command)} --reference | head -n 1", shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("[model]\n", "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (75, "error: [Errno 28] No space left on device\n")
    closed = f"{' '.join(command)} --output {tmp_path}/x <&- >&- 2>&-; echo $?"
    assert subprocess.run(closed, shell=True, capture_output=True, text=True).stdout == "2\n"
    environment = {**os.environ, "HYBRIDFLOW_LOGGING_LEVEL": "debug"}
    done = subprocess.run([*command, "missing.toml"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    for text in ("error: recipe missing.toml does not exist", "Traceback", "load_config"):
        assert text in done.stderr


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[trainer]\nseed = 5\n")
    return path


def parse(*arguments):
    parser = argparse.ArgumentParser()
    for add in (add_recipe_arguments, add_stop_after, add_checkpoint_arguments):
        add(parser)
    return parser.parse_intermixed_args([str(argument) for argument in arguments])


def test_recipe_overrides_and_options_can_be_mixed(recipe):
    args = parse(recipe, "trainer.epochs=2", "--stop-after", "3", "trainer.log_samples=1")
    config = config_of(args)
    assert (config.trainer.seed, config.trainer.epochs, config.trainer.log_samples) == (5, 2, 1)
    assert args.stop_after == 3
    assert config_of(parse("trainer.seed=7")).trainer.seed == 7
    config = config_of(parse("trainer.seed=7"), default_recipe=recipe, more=["trainer.seed=6", "trainer.epochs=4"])
    assert (config.trainer.seed, config.trainer.epochs) == (7, 4)  # an override wins over an option
    assert config_of(parse()).trainer.seed == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--actor.optimizer.lr=1e-5", "4"], "are written without dashes: actor.optimizer.lr=1e-5\n"),
        (["-trainer.seed=3"], "-trainer.seed=3 is not an option: overrides are written without dashes: trainer.seed=3"),
        (["--trainer.seed", "4"], "are written without dashes: trainer.seed=VALUE\n"),
    ],
)
def test_an_override_with_dashes_shows_how_to_write_it(arguments, problem, recipe, shown):
    assert problem in shown("config", recipe, *arguments, status=2)[1]


def test_options_of_checkpoints_and_steps_are_checked(capsys):
    for text in ("0", "-1", "two", "1.5"):
        with pytest.raises(SystemExit):
            parse(f"--stop-after={text}")
        assert f"{text!r} is invalid: expected a positive integer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--run", "a", "--checkpoint", "b")
    assert config_and_checkpoint(parse()) == (load_config(None), None)
    with pytest.raises(ConfigError, match="--step 4 needs a run; add --run DIR"):
        config_and_checkpoint(parse("--step", "4"))


def test_rows_replace_the_contents_of_a_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("old\n")
    write_rows(file, [{"a": 1}, {"b": "ü"}])
    assert file.read_text("utf-8") == '{"a": 1}\n{"b": "ü"}\n'
    with pytest.raises(DataError, match=r"--output=.*absent/rows\.jsonl cannot be written"):
        write_rows(Path("absent/rows.jsonl"), [])


def test_config_prints_the_configuration_the_reference_or_all_problems(recipe, shown):
    assert shown("config", recipe, "trainer.epochs=3")[0] == to_toml(load_config(recipe, ["trainer.epochs=3"]))
    assert shown("config", "trainer.seed=1")[0] == to_toml(load_config(None, ["trainer.seed=1"]))
    assert shown("config", "--reference")[0] == reference_text()
    assert shown("config", "--reference", "--markdown")[0] == reference_markdown()
    assert shown("config", recipe, "trainer.seeds=3", "rollout.group_size=0", status=2) == (
        "",
        f"error: 2 problem(s) in {recipe} with overrides:\n"
        "  rollout.group_size=0 is invalid: expected a value greater than 0\n"
        "  trainer.seeds: no such key; did you mean trainer.seed?\n",
    )


@pytest.mark.parametrize("form", ["text", "mermaid", "svg"])
def test_graph_draws_a_recipe_without_its_model(shown, form):
    plain, _ = shown("graph", RECIPE, "--format", form)
    assert "RewardWorker.score" in plain
    assert shown("graph", RECIPE, "--format", form, "model.path=owner/model")[0] == plain


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_pictures_of_the_docs_are_those_that_graph_draws(shown, name):
    picture = DOCS / f"images/dataflow_{name}.svg"
    command = ("graph", f"recipes/algorithms/{name}.toml", "--format", "svg")
    drawn, _ = shown("graph", str(DOCS.parent / command[1]), *command[2:])
    assert drawn == picture.read_text("utf-8"), f"hybridflow {' '.join(command)} --output {picture}"
