"""Commands with bad run directories and paths, one line each: the damage, the command, the error, the exit status."""

import os
import re
import time

import pytest
import torch

from hybridflow.checkpoint import CheckpointStore, save_state
from hybridflow.cli.main import main
from hybridflow.data import write_sft_file
from hybridflow.errors import DataError
from hybridflow.runtime.observe import JsonlWriter

LONGEST_LINE = 2010
FAILED, USAGE = 1, 2

# What a command is given: RUN is the damaged path, MODEL a good model directory, DATA a good file for SFT.
EVALUATE = "evaluate --run RUN"
GENERATE = "generate --prompt w3 --run RUN"
CHECKPOINT = "generate --prompt w3 --model MODEL --checkpoint RUN"
EXPORT = "export RUN out"
SHORT = "trainer.total_steps=1 offline.batch_size=1"
TRAIN = f"sft {SHORT} model.path=MODEL data.train_files=['DATA'] trainer.run_dir=RUN"
PREPARE = "prepare multiplication --train-size 2 --test-size 1 --output-dir RUN"
MEMORY = "memory model.path=RUN"
DRAW = "graph --output RUN"
OUTPUT = "generate --prompt w3 --model MODEL data.max_response_length=1 --output RUN"
READERS = (EVALUATE, GENERATE)
OPENERS = (EXPORT, CHECKPOINT)


def run_with(**files):
    """Return a maker of a directory with files; a name's "__" is a dot."""

    def make(path):
        path.mkdir()
        for name, contents in files.items():
            (path / name.replace("__", ".")).write_bytes(contents)

    return make


def inside(name, make):
    """Return a maker of a directory in which a function makes the path `name`."""

    def make_all(path):
        (path / name).parent.mkdir(parents=True)
        make(path / name)

    return make_all


def manifest(change):
    """Return a maker of a run with a checkpoint, whose manifest a function changes."""

    def make(path):
        path.mkdir()
        (path / "config.toml").write_text("[trainer]\nseed = 1\n")
        with CheckpointStore(path / "checkpoints").begin(3, {"kind": "train"}) as partial:
            save_state({"a": torch.ones(3)}, partial / "actor")
        change(path / "checkpoints" / "step_000003" / "checkpoint.json")

    return make


def tensors(change):
    """Return a maker of a run with a checkpoint, whose tensors a function changes."""
    return manifest(lambda file: change(file.with_name("actor.safetensors")))


def text(contents):
    return lambda path: path.write_text(contents)


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


NOT_A_RUN = r"--run '.*' is not the directory of a run: '.*config\.toml' does not exist"
NOT_A_CHECKPOINT = r"is neither a checkpoint nor a run with checkpoints: there are none in"
DEEP = b"[" * 100_000

CASES = [
    # name, maker of the path, commands, status, what the error says
    ("missing", lambda path: None, READERS, USAGE, NOT_A_RUN),
    ("missing", lambda path: None, OPENERS, USAGE, NOT_A_CHECKPOINT),
    ("missing", lambda path: None, (MEMORY,), USAGE, r"is not a model directory: config\.json not found"),
    ("an empty model", run_with(config__json=b"{}"), (MEMORY,), FAILED, r"cannot be loaded .* Should have a"),
    ("a file", text("x"), (PREPARE,), USAGE, r"train\.parquet: cannot be written: .*File exists"),
    ("empty", folder, (OUTPUT, DRAW), USAGE, r"--output=.* cannot be written: .*is a directory; expected a file"),
    ("a link to itself", lambda path: path.symlink_to(path.name), READERS, USAGE, NOT_A_RUN),
    ("a link to itself", lambda path: path.symlink_to(path.name), OPENERS, USAGE, NOT_A_CHECKPOINT),
    ("a link to itself", lambda path: path.symlink_to(path.name), (TRAIN,), USAGE, r"cannot be used: .*symbolic"),
    ("a pipe", pipe, READERS, USAGE, NOT_A_RUN),
    ("a pipe", pipe, OPENERS, USAGE, NOT_A_CHECKPOINT),
    ("a pipe", pipe, (OUTPUT, DRAW), USAGE, r"--output=.* cannot be written: .*is a pipe, device or socket;"),
    ("a broken config.toml", run_with(config__toml=b"[trainer"), READERS, USAGE, r"config\.toml: Expected '\]'"),
    ("an unknown key", run_with(config__toml=b"[evil]\nx = 1"), READERS, USAGE, r"1 problem\(s\) in .*config\.toml:"),
    ("a pipe for config.toml", inside("config.toml", pipe), READERS, USAGE, NOT_A_RUN),
    ("a broken run.json", run_with(config__toml=b"", run__json=b"{"), READERS, USAGE, NOT_A_CHECKPOINT),
    ("a file for checkpoints", inside("checkpoints", text("x")), OPENERS, USAGE, "is not a directory.*move it away"),
    ("a file for a step", inside("checkpoints/step_000003", text("x")), OPENERS, USAGE, NOT_A_CHECKPOINT),
    ("no manifest", manifest(os.unlink), (*OPENERS, TRAIN), FAILED, r"checkpoint\.json' is missing, so"),
    ("a pipe for tensors", tensors(pipe), (*OPENERS, TRAIN), FAILED, r"actor\.safetensors' .*is a FIFO, not a"),
    ("a deep manifest", manifest(text("[" * 100_000)), OPENERS, FAILED, r"cannot be read as JSON: maximum recursion"),
    ("changed tensors", tensors(lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\7")), OPENERS, FAILED, r"SHA-256 is"),
    ("of another kind", manifest(lambda file: None), (TRAIN,), USAGE, r"was made by `hybridflow train`, so"),
    ("of other tensors", manifest(lambda file: None), (CHECKPOINT,), FAILED, r"actor"),
]

MODELS = ("generate --prompt w3 --model RUN", "export MODEL RUN", "export RUN x --model RUN")
EVERY = (*READERS, *OPENERS, PREPARE, OUTPUT, MEMORY, DRAW, *MODELS)
NAMES = [
    # name, the path, commands, what the error says
    ("a name of 10 MB", "r" * 10**7, (*EVERY, TRAIN, "config RUN", "graph RUN"), r"File name too long|there are"),
    ("a NUL", "a\0b", (*EVERY, "config RUN", "graph RUN"), r"NUL|null|does not exist|there are none|not found"),
    ("bytes that are not UTF-8", "\udcff", (*READERS, *OPENERS, "config RUN"), r"\\udcff"),
    ("a file as a folder", "/dev/null/x", (*EVERY, TRAIN), r"Not a directory|does not exist|there are none|not"),
]


UNREADABLE = [
    # name, what is unreadable, commands, what the error says
    ("the run", ".", (*READERS, *OPENERS, TRAIN), r"Permission denied"),
    ("its configuration", "config.toml", READERS, r"config\.toml: cannot be read: Permission denied"),
    ("its manifest", "checkpoints/step_000003/checkpoint.json", (*OPENERS, TRAIN), r"cannot be read: Permission"),
]


def pairs(table):
    """Return a parameter for each case and command; the first one stands for the others."""
    return [
        pytest.param(
            case[1],
            command,
            *case[3:],
            id=f"{case[0]}, {command.split()[0]}",
            marks=[pytest.mark.exhaustive] * (number > 0 and command != TRAIN),
        )
        for case in table
        for number, command in enumerate(case[2])
    ]


@pytest.fixture
def error_of(tiny_model, tmp_path, monkeypatch, capsys):
    """Return `error_of(command, path)`: status and error of a command, which must end soon and without traceback."""
    monkeypatch.chdir(tmp_path)
    data = write_sft_file(tmp_path / "data.parquet", [("w3", "w4")] * 8)

    def run(command, path):
        paths = {"MODEL": str(tiny_model("llama")), "DATA": str(data), "RUN": path}
        start = time.process_time()
        status = main([re.sub("RUN|MODEL|DATA", lambda match: paths[match[0]], word) for word in command.split()])
        assert time.process_time() - start < 60
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert sum(line.startswith("error: ") for line in error.splitlines()) == 1, error[-2000:]
        assert max(map(len, error.splitlines())) <= LONGEST_LINE
        return status, error

    return run


@pytest.mark.parametrize(("make", "command", "status", "message"), pairs(CASES))
def test_a_bad_run_directory_is_one_error(error_of, tmp_path, make, command, status, message):
    make(tmp_path / "run")
    found, error = error_of(command, str(tmp_path / "run"))
    assert re.search(message, error), error
    assert found == status
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("obeys_modes")
@pytest.mark.parametrize(("name", "command", "message"), pairs(UNREADABLE))
def test_an_unreadable_run_is_one_error(error_of, tmp_path, name, command, message):
    manifest(lambda file: None)(tmp_path / "run")
    unreadable = tmp_path / "run" / name
    mode = unreadable.stat().st_mode
    unreadable.chmod(0)
    try:
        status, error = error_of(command, str(tmp_path / "run"))
    finally:
        unreadable.chmod(mode)
    assert re.search(message, error), error
    assert status in (FAILED, USAGE)


@pytest.mark.parametrize(("name", "command", "message"), pairs(NAMES))
def test_a_name_that_cannot_be_opened_is_one_error(error_of, name, command, message):
    status, error = error_of(command, name)
    assert re.search(message, error), error
    assert status == USAGE


@pytest.mark.parametrize("step", [b'{"loss": 1}\n', b"[]\n", b"{\n", DEEP + b"\n"], ids=range(4))
def test_broken_metrics_of_a_run_that_continues_are_one_error(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_bytes(step)
    wanted = r"metrics\.jsonl, line 1: (not valid JSON|.*is not a JSON object|the row has no integer step)"
    with pytest.raises(DataError, match=wanted):
        JsonlWriter(tmp_path / "metrics.jsonl").truncate_after(1)
