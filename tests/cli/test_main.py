import os
import signal
import subprocess
import sys
from importlib import import_module

import pytest

from hybridflow import __version__
from hybridflow.cli.exit_codes import exit_codes_text
from hybridflow.cli.main import COMMANDS, Command, main
from hybridflow.config import leaf_keys
from hybridflow.config.render import toml_value
from hybridflow.errors import DataError, LostWeightSyncError, WorkerDiedError, WorkerError


@pytest.fixture
def fake_command(monkeypatch):
    """Add a command `fake` whose `run` is the given function."""

    def add(run, doc="Does something fake.\n\nIn two paragraphs."):
        module = type(sys)("fake_command")
        module.__doc__ = doc
        module.add_arguments = lambda parser: parser.add_argument("word", nargs="?")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(COMMANDS, "fake", Command("fake_command", "do something fake", "fake it"))

    return add


def test_help_lists_every_command_with_an_example(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in shown
        assert command.help in shown
        assert f"hybridflow {command.example}" in shown
        assert command.example.startswith(name)


def test_without_a_command_help_is_shown_and_the_status_is_2(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_version_is_shown(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"hybridflow {__version__}\n"


def test_an_unknown_command_suggests_the_nearest(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["trian", "recipe.toml"])
    assert exit_.value.code == 2
    assert "'trian' is not a command; did you mean train?" in capsys.readouterr().err


def test_an_unknown_command_without_a_similar_one_lists_all(capsys):
    with pytest.raises(SystemExit):
        main(["xyz"])
    assert f"commands: {', '.join(COMMANDS)}." in capsys.readouterr().err


def test_a_command_gets_its_arguments_and_its_status_is_returned(fake_command):
    fake_command(lambda args: {"it": 5}[args.word])
    assert main(["fake", "it"]) == 5


def test_a_commands_help_is_its_docstring_with_an_example(fake_command, capsys):
    fake_command(lambda args: 0)
    with pytest.raises(SystemExit) as exit_:
        main(["fake", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: hybridflow fake" in shown
    assert "In two paragraphs." in shown
    assert "example: hybridflow fake it" in shown


def test_a_hybridflow_error_is_one_line_on_stderr(fake_command, capsys):
    def run(args):
        raise DataError("data.parquet is empty; write it again")

    fake_command(run)
    assert main(["fake"]) == 1
    assert capsys.readouterr().err == "error: data.parquet is empty; write it again\n"


def test_status_75_ends_with_the_hint_of_the_command(fake_command, capsys, monkeypatch):
    def run(args):
        raise WorkerDiedError("worker actor/0 died")

    fake_command(run)
    assert main(["fake", "it"]) == 75
    assert capsys.readouterr().err == "error: worker actor/0 died\n"
    monkeypatch.setattr(sys.modules["fake_command"], "how_to_go_on", lambda args: f"Run {args.word}.", raising=False)
    assert main(["fake", "it"]) == 75
    assert capsys.readouterr().err == "error: worker actor/0 died\nRun it.\n"


def test_output_to_a_full_disk_is_status_75_without_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hybridflow", "config"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 75
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_help_shows_the_exit_status_of_each_outcome(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"exit status:\n{exit_codes_text()}\n" in capsys.readouterr().out


def test_any_other_error_keeps_its_traceback(fake_command):
    fake_command(lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["fake"])


def test_an_unexpected_error_of_a_worker_shows_its_traceback(fake_command, capsys):
    def run(args):
        try:
            1 // 0  # noqa: B018
        except ZeroDivisionError as error:
            raise WorkerError("Actor.update failed on worker actor/0: ZeroDivisionError") from error

    fake_command(run)
    assert main(["fake"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("error: Actor.update failed on worker actor/0: ZeroDivisionError\n")


def test_a_lost_process_of_a_weight_sync_shows_no_traceback(fake_command, capsys):
    def run(args):
        raise LostWeightSyncError("process 7 exited") from OSError("a traceback of the worker")

    fake_command(run)
    assert main(["fake"]) == 75
    assert capsys.readouterr().err.startswith("error: process 7 exited\n")


def test_ctrl_c_is_status_130(fake_command, capsys):
    def run(args):
        raise KeyboardInterrupt

    fake_command(run)
    assert main(["fake"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_sigterm_outside_a_training_loop_acts_as_ctrl_c(fake_command, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    fake_command(lambda args: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["fake"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == handler


def test_an_existing_sigterm_handler_is_kept(fake_command, monkeypatch):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("own handler"))
    try:
        fake_command(lambda args: os.kill(os.getpid(), signal.SIGTERM) or 0)
        assert main(["fake"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["own handler"]


def test_debug_level_shows_the_traceback_of_an_error():
    program = (
        "import sys; from hybridflow.cli import main as m; sys.argv = ['hybridflow', 'config', 'missing.toml']; "
        "sys.exit(m.main())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "HYBRIDFLOW_LOGGING_LEVEL": "debug"},
    )
    assert done.returncode == 2
    assert "error: recipe missing.toml does not exist" in done.stderr
    assert "Traceback" in done.stderr
    assert "load_config" in done.stderr


def test_a_closed_output_pipe_is_not_an_error():
    done = subprocess.run(
        f"{sys.executable} -m hybridflow config --reference | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[model]\n"
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["train", "sft", "dpo", "reward-model", "evaluate", "generate", "memory"])
def test_the_help_of_a_command_lists_its_keys_with_their_defaults(name, capsys):
    keys = import_module(COMMANDS[name].module).KEYS
    assert set(keys) <= leaf_keys().keys()
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n  {key} = {toml_value(leaf_keys()[key])}\n" in shown for key in keys)
    assert max(map(len, shown.splitlines())) <= 120
