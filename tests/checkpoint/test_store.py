import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridflow.checkpoint import Checkpoint, CheckpointStore, load_state, open_checkpoint, save_state, saved_files
from hybridflow.checkpoint.unreadable_file import unreadable
from hybridflow.errors import CheckpointError


def save(store: CheckpointStore, step: int, value: float | None = None) -> None:
    with store.begin(step, info={"fingerprint": "abc", "epoch": step // 10}) as directory:
        save_state({"model": {"w": torch.full((8,), float(step if value is None else value))}}, directory / "actor")
        save_state({"row": step * 4}, directory / "data")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def value_of(checkpoint: Checkpoint | None) -> float:
    assert checkpoint is not None
    return checkpoint.load("actor")["model"]["w"][0].item()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, 3)


def test_store_without_directory_is_empty(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.list() == ()
    assert store.latest() is None
    assert not store.directory.exists()


def test_checkpoint_has_step_info_and_components(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 20)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.directory == tmp_path / "checkpoints" / "step_000020"
    assert (checkpoint.step, checkpoint.info) == (20, {"fingerprint": "abc", "epoch": 2})
    assert checkpoint.components == ("actor", "data")
    assert checkpoint.load("data") == {"row": 80}
    assert checkpoint.load("actor", "model")["w"].tolist() == [20.0] * 8
    assert names(checkpoint.directory) == [
        "actor.json",
        "actor.safetensors",
        "checkpoint.json",
        "data.json",
        "data.safetensors",
    ]
    with pytest.raises(CheckpointError, match="has no component 'critic'; it has actor, data"):
        checkpoint.load("critic")


def test_components_may_be_in_subdirectories(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.begin(1) as directory:
        (directory / "critic").mkdir()
        save_state([1], directory / "critic" / "rank_0")
    checkpoint = store.open(1)
    assert checkpoint.components == ("critic/rank_0",)
    assert checkpoint.load("critic/rank_0") == [1]


def test_equal_states_give_equal_checkpoints(tmp_path):
    for name in ("first", "second"):
        save(CheckpointStore(tmp_path / name), 5)
    for name in names(tmp_path / "first" / "step_000005"):
        contents = [(tmp_path / run / "step_000005" / name).read_bytes() for run in ("first", "second")]
        assert contents[0] == contents[1]


def test_newest_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 1_000_000, 12_345_678):
        save(store, step)
        assert store.list()[-1] == step
    assert names(tmp_path) == ["step_1000000", "step_12345678"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10, value=1.0)
    with store.begin(10) as directory:
        save_state({"model": {"w": torch.tensor([2.0])}}, directory / "actor")
    assert value_of(store.latest()) == 2.0
    assert store.open(10).components == ("actor",)
    assert names(tmp_path) == ["step_000010"]


def test_failed_replacement_keeps_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10, value=1.0)
    with pytest.raises(ZeroDivisionError), store.begin(10) as directory:
        (directory / "actor.json").write_text(str(1 / 0))
    assert value_of(store.latest()) == 1.0
    assert names(tmp_path) == ["step_000010"]


def test_exception_of_writer_is_raised_and_nothing_remains(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.begin(1):
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_unsupported_value_keeps_earlier_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    message = r"step 2 was not saved: state\['f'\] is a function.* untouched, the newest is '.*step_000001'"
    with pytest.raises(CheckpointError, match=message), store.begin(2) as directory:
        save_state({"f": lambda: 1}, directory / "actor")
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("name", ["model.pt", "actor.pkl", "actor.py", "notes"])
def test_only_safetensors_and_json_are_allowed_in_checkpoint(tmp_path, name):
    message = rf"step 1 was not saved: .*{name}' is not a plain"
    with pytest.raises(CheckpointError, match=message), CheckpointStore(tmp_path).begin(1) as directory:
        (directory / name).write_bytes(b"x")
    assert names(tmp_path) == []


def test_symbolic_link_in_checkpoint_is_an_error(tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"link\.json' is not a plain"), store.begin(1) as directory:
        (directory / "link.json").symlink_to(tmp_path / "secret.json")


@pytest.mark.parametrize("info", [{"a": (1, 2)}, {1: 2}, {"a": torch.tensor(1)}, {"a": float("nan")}])
def test_info_changed_by_json_is_an_error(tmp_path, info):
    with pytest.raises(CheckpointError, match="info="), CheckpointStore(tmp_path).begin(1, info=info):
        pass
    assert names(tmp_path) == []


def test_invalid_arguments_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0 is invalid: expected a positive number"):
        CheckpointStore(tmp_path, keep=0)
    with (
        pytest.raises(CheckpointError, match="step=-1 is invalid: expected 0 or a positive number"),
        CheckpointStore(tmp_path).begin(-1),
    ):
        pass


def test_missing_step_error_lists_saved_steps(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 30 in .*; there are none"):
        store.open(30)
    save(store, 10)
    save(store, 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 30 in .*; there are 10, 20"):
        store.open(30)


def test_other_files_in_directory_are_not_touched(tmp_path):
    others = ["step_12", "step_0000012", "step_000012.bak", "notes.txt", ".tmp-mine", ".tmp-other-0123456789abcdef"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step_000099").write_text("a file")
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    save(store, 2)
    assert store.list() == (2,)
    assert names(tmp_path) == sorted([*others, "step_000099", "step_000002"])


# --- damage -----------------------------------------------------------------------------------------------------------


def damage_manifest(directory: Path, **changes: object) -> None:
    document = json.loads((directory / "checkpoint.json").read_text())
    (directory / "checkpoint.json").write_text(json.dumps(document | changes))


def truncate(directory: Path) -> None:
    os.truncate(directory / "actor.safetensors", 40)


DAMAGES = {
    "a missing file": (lambda d: (d / "data.json").unlink(), r"data\.json' is missing"),
    "a truncated file": (truncate, r"actor\.safetensors' is damaged: it has 40 bytes, but was saved with \d+"),
    "a flipped bit": (lambda d: flip_a_bit(d / "actor.safetensors"), r"actor\.safetensors' is damaged: its SHA-256 is"),
    "a flipped bit of json": (lambda d: flip_a_bit(d / "data.json"), r"data\.json' is damaged: its SHA-256 is"),
    "a pickle": (
        lambda d: (d / "actor.safetensors").write_bytes(pickle.dumps([1] * 999)),
        r"actor\.safetensors' is damaged: it has",
    ),
    "a directory for a file": (
        lambda d: ((d / "data.json").unlink(), (d / "data.json").mkdir()),
        r"data\.json' is a directory, not a regular file",
    ),
    "a FIFO for a file": (
        lambda d: ((d / "data.json").unlink(), os.mkfifo(d / "data.json")),
        r"data\.json' is a FIFO, not a regular file",
    ),
    "a FIFO for the manifest": (
        lambda d: ((d / "checkpoint.json").unlink(), os.mkfifo(d / "checkpoint.json")),
        r"checkpoint\.json' is a FIFO, not a regular file",
    ),
    "a link to an equal file": (
        lambda d: (d / "data.json").rename(d.parent / "x") and (d / "data.json").symlink_to(d.parent / "x"),
        r"data\.json' is a symbolic link, not a regular file",
    ),
    "an unlisted folder of shards": (
        lambda d: ((d / "actor").mkdir(), shutil.copy(d / "actor.safetensors", d / "actor" / "shard.safetensors")),
        r"actor/shard\.safetensors' is not listed in checkpoint\.json, so it is not of this checkpoint; remove it",
    ),
    "no manifest": (
        lambda d: (d / "checkpoint.json").unlink(),
        r"checkpoint\.json' is missing, so .* is not a checkpoint",
    ),
    "an empty manifest": (
        lambda d: (d / "checkpoint.json").write_text(""),
        r"checkpoint\.json' cannot be read as JSON",
    ),
    "a binary manifest": (lambda d: (d / "checkpoint.json").write_bytes(b"\xff\x00"), "cannot be read as JSON"),
    "a foreign manifest": (lambda d: (d / "checkpoint.json").write_text('{"a": 1}'), "hybridflow did not write it"),
    "a list for a manifest": (lambda d: (d / "checkpoint.json").write_text("[]"), "hybridflow did not write it"),
    "a changed manifest": (
        lambda d: damage_manifest(d, info={"epoch": 9}),
        r"checkpoint\.json' is damaged: its SHA-256 differs",
    ),
    "a newer format": (
        lambda d: damage_manifest(d, version=2),
        r"format version 2, but this hybridflow reads version 1; .*a newer one",
    ),
    "a link to an equal directory": (
        lambda d: d.rename(d.parent / "x") and d.symlink_to(d.parent / "x"),
        r"step_000040' is a symbolic link, not a directory",
    ),
    "a renamed directory": (lambda d: (d.rename(d.with_name("x")), (d.parent / "step_000001").rename(d)), "of step 1;"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_error_names_file_and_previous_valid_checkpoint(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 20, 40):
        save(store, step)
    inflict, message = DAMAGES[damage]
    inflict(tmp_path / "step_000040")
    advice = r"move '.*step_000040' out of .* with trainer\.resume=auto"
    full_message = rf"{message}.*newest valid checkpoint before it is '.*step_000020'.*{advice}"
    fresh = CheckpointStore(tmp_path, keep=9)
    with pytest.raises(CheckpointError, match=full_message):
        fresh.latest()
    with pytest.raises(CheckpointError, match=full_message):
        store.latest()
    assert value_of(fresh.open(20)) == 20.0


DAMAGES_OF_DIRECTORIES = ("a renamed directory", "a link to an equal directory")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_error_is_made_of_sentences_and_names_a_file_once(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 20, 40):
        save(store, step)
    DAMAGES[damage][0](tmp_path / "step_000040")
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    first, stop, _ = str(caught.value).partition("The newest valid checkpoint before it")
    assert stop
    assert first.endswith(". ")
    assert not first.endswith(".. ")
    assert first.count(f"{tmp_path}/step_000040/") == 1 or damage in DAMAGES_OF_DIRECTORIES
    assert "as JSON" not in first or damage in ("an empty manifest", "a binary manifest")


def test_unreadable_file_error_names_it_once_with_the_reason(tmp_path):
    path = tmp_path / "data.json"
    error = unreadable(path, PermissionError(errno.EACCES, "Permission denied", str(path)))
    assert str(error) == f"'{path}' cannot be read: Permission denied."
    assert str(unreadable(path, ValueError("embedded null byte"))) == f"'{path}' cannot be read: embedded null byte."


def test_link_in_place_of_a_checkpoint_is_an_error_and_is_not_pruned(tmp_path):
    elsewhere = CheckpointStore(tmp_path / "elsewhere")
    save(elsewhere, 40)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 20)
    (tmp_path / "checkpoints" / "step_000040").symlink_to(elsewhere.path(40))
    with pytest.raises(
        CheckpointError, match=r"step_000040' is a symbolic link, not a directory.*before it is '.*step_000020'"
    ):
        store.latest()
    save(store, 50)
    assert names(tmp_path / "checkpoints") == ["step_000040", "step_000050"]
    assert value_of(elsewhere.latest()) == 40.0


def test_moving_damaged_checkpoint_away_resumes_from_previous_one(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 20)
    save(store, 40)
    flip_a_bit(tmp_path / "checkpoints" / "step_000040" / "actor.safetensors")
    (tmp_path / "checkpoints" / "step_000040").rename(tmp_path / "step_000040")
    assert value_of(CheckpointStore(tmp_path / "checkpoints").latest()) == 20.0


def test_error_skips_other_damaged_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(store, step)
    flip_a_bit(tmp_path / "step_000003" / "data.json")
    flip_a_bit(tmp_path / "step_000002" / "data.json")
    with pytest.raises(CheckpointError, match=r"newest valid checkpoint before it is '.*step_000001'"):
        CheckpointStore(tmp_path).latest()
    flip_a_bit(tmp_path / "step_000001" / "data.json")
    with pytest.raises(
        CheckpointError, match=r"No earlier checkpoint is valid; start again in an empty trainer\.run_dir"
    ):
        CheckpointStore(tmp_path).latest()


def list_in_manifest(directory: Path, **files: dict[str, object]) -> None:
    """Replace the files of a manifest, and sign it."""
    path = directory / "checkpoint.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    document["files"] = files
    document["sha256"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(document))


def entry_of(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.mark.parametrize("outside", ["../secret.json", "/etc/secret.json", "a/../../secret.json", "model.pt"])
def test_manifest_cannot_refer_to_outside_files_or_code(tmp_path, outside):
    save(CheckpointStore(tmp_path), 1)
    list_in_manifest(tmp_path / "step_000001", **{outside: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match=f"lists '{outside}', which is not a file of a checkpoint"):
        open_checkpoint(tmp_path / "step_000001")


def test_listed_link_and_folder_of_a_link_are_not_followed(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    directory, outside = tmp_path / "step_000001", tmp_path / "outside"
    outside.mkdir()
    (directory / "data.json").rename(outside / "data.json")
    (directory / "data.json").symlink_to(outside / "data.json")
    list_in_manifest(directory, **{"data.json": entry_of(outside / "data.json")})
    with pytest.raises(CheckpointError, match=r"data\.json' is a symbolic link, not a regular file"):
        open_checkpoint(directory)
    (directory / "folder").symlink_to(outside)
    list_in_manifest(directory, **{"folder/data.json": entry_of(outside / "data.json")})
    with pytest.raises(CheckpointError, match=r"folder' is a symbolic link, not a directory"):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["a\0.json", "\ud800.json"])
def test_listed_name_that_no_file_can_have_is_an_error(tmp_path, name):
    save(CheckpointStore(tmp_path), 1)
    list_in_manifest(tmp_path / "step_000001", **{name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path / "step_000001")


def test_moved_checkpoint_can_be_opened(tmp_path):
    save(CheckpointStore(tmp_path / "checkpoints"), 7)
    copy = (tmp_path / "checkpoints" / "step_000007").rename(tmp_path / "best")
    assert value_of(open_checkpoint(copy)) == 7.0
    with pytest.raises(CheckpointError, match=r"missing/checkpoint\.json' is missing, so"):
        open_checkpoint(tmp_path / "missing")


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_incomplete_checkpoints_are_neither_counted_nor_pruned(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        save(store, step)
    (tmp_path / "step_000002" / "data.json").unlink()
    save(store, 3)
    assert store.list() == (1, 2, 3)
    save(store, 4)
    assert store.list() == (2, 3, 4)


def test_newest_valid_checkpoint_is_not_pruned(tmp_path):
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path, keep=9), step)
    for step in (2, 3):
        flip_a_bit(tmp_path / f"step_{step:06d}" / "data.json")
    store = CheckpointStore(tmp_path, keep=1)
    store.prune()
    assert store.list() == (1, 3)
    assert value_of(store.open(1)) == 1.0


def test_save_below_damaged_newer_step_is_not_pruned(tmp_path):
    save(CheckpointStore(tmp_path), 60)
    flip_a_bit(tmp_path / "step_000060" / "actor.safetensors")
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 40)
    assert store.list() == (40, 60)
    assert value_of(store.open(40)) == 40.0


# --- files that other processes wrote ---------------------------------------------------------------------------------


def test_files_that_ranks_report_are_not_read_again(tmp_path):
    store, saved = CheckpointStore(tmp_path), []
    with store.begin(10, saved=saved) as directory:
        files = save_state([1.0], directory / "actor")
        save_state([2.0], directory / "controller")
        saved += [file._replace(sha256="0" * 64) for file in saved_files(directory, files)]
    manifest = json.loads((store.path(10) / "checkpoint.json").read_text())
    assert manifest["files"]["actor.json"]["sha256"] == "0" * 64
    digest = hashlib.sha256((store.path(10) / "controller.json").read_bytes()).hexdigest()
    assert manifest["files"]["controller.json"]["sha256"] == digest
    with pytest.raises(CheckpointError, match=r"actor\.json' is damaged: its SHA-256"):
        store.open(10)


def save_and_change(
    store: CheckpointStore, step: int, change: Callable[[Path], None], reported: str = "actor.json"
) -> None:
    """Save a checkpoint with a file that a rank reports, and change it afterwards."""
    saved = []
    with store.begin(step, saved=saved) as directory:
        (directory / reported).write_text("a rank's")
        saved += saved_files(directory, [directory / reported])
        change(directory / reported)


@pytest.mark.parametrize(("change", "state"), [(Path.unlink, "is missing"), (shorten, "has 3 bytes")])
def test_a_checkpoint_without_files_of_a_rank_is_not_published(tmp_path, change, state):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10)
    message = rf"step 20 was not saved: '.*/actor\.json' {state} on node .*on a file system that they share\. Earlier"
    with pytest.raises(CheckpointError, match=message):
        save_and_change(store, 20, change)
    assert names(tmp_path) == ["step_000010"]
    assert value_of(store.latest()) == 10.0


def test_a_file_of_a_rank_that_could_hold_code_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"actor\.pt' is not a plain \.safetensors or \.json file"):
        save_and_change(CheckpointStore(tmp_path), 20, lambda path: None, reported="actor.pt")
    assert names(tmp_path) == []


# --- full and read-only disks -----------------------------------------------------------------------------------------


def save_large(store: CheckpointStore, step: int) -> None:
    with store.begin(step) as directory:
        save_state({"w": torch.zeros(100_000)}, directory / "actor")
        save_state({"w": torch.zeros(1 << 19)}, directory / "critic")


def save_on_the_last_block(store: CheckpointStore, step: int) -> None:
    """Fill the disk so that there is no room for the manifest."""
    with store.begin(step) as directory:
        save_state([1], directory / "actor")
        with contextlib.suppress(OSError), open(directory / "filler.json", "wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)


FULL_DISKS = {
    save_large: r"cannot write '.*/critic' \(2\.0 MiB needed, [\d.]+ KiB free on .*No space left on device.*",
    save_on_the_last_block: r".*No space left on device.* \([\d.]+ KiB were written, 0 bytes free on .*",
}


@pytest.mark.parametrize("save_too_much", FULL_DISKS)
def test_full_disk_during_save_keeps_earlier_checkpoint(small_disk, save_too_much):
    store = CheckpointStore(small_disk / "checkpoints")
    save(store, 10)
    untouched = r"Earlier checkpoints are untouched, the newest is '.*step_000010'"
    with pytest.raises(CheckpointError, match=rf"step 20 was not saved: {FULL_DISKS[save_too_much]}{untouched}"):
        save_too_much(store, 20)
    assert names(store.directory) == ["step_000010"]
    assert value_of(store.latest()) == 10.0
    save(store, 20)  # there is room again
    assert store.list() == (10, 20)


def test_read_only_disk_can_be_read_and_names_cause_when_written(small_disk):
    save(CheckpointStore(small_disk), 10)
    (small_disk / ".tmp-step_000020-0123456789abcdef").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    store = CheckpointStore(small_disk)
    assert value_of(store.latest()) == 10.0
    with pytest.raises(CheckpointError, match=r"step 20 was not saved: .*Read-only file system"):
        save(store, 20)


# --- killed writers ---------------------------------------------------------------------------------------------------

KILLED_WRITER = """
import sys, time, torch
from hybridflow.checkpoint import CheckpointStore, save_state
store = CheckpointStore(sys.argv[1])
if sys.argv[2] == "between components":
    with store.begin(2) as directory:
        save_state({"w": torch.ones(1000)}, directory / "actor")
        print("inside", flush=True)
        time.sleep(1000)
else:  # in the middle of one write after another, the same two steps again and again
    print("inside", flush=True)
    number = 0
    while True:
        number += 1
        with store.begin(1 + number % 2, info={"number": number}) as directory:
            save_state({"w": torch.full((500_000,), float(number))}, directory / "actor")
            save_state({"number": number}, directory / "data")
"""


def start_writer(directory: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED_WRITER, str(directory), mode]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "inside\n"
    return writer


def kill(writer: subprocess.Popen[str]) -> None:
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL


def test_leftovers_are_removed_only_after_their_writer_is_dead(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    writer = start_writer(tmp_path, "between components")
    store = CheckpointStore(tmp_path)
    assert len(names(tmp_path)) == 2, "the directory of a live writer must be kept"
    save(store, 3)
    assert len(names(tmp_path)) == 3
    kill(writer)
    assert len(names(tmp_path)) == 3
    assert value_of(CheckpointStore(tmp_path).open(1)) == 1.0
    assert names(tmp_path) == ["step_000001", "step_000003"]


def wait_for_partial(directory: Path, prefix: str) -> None:
    """Wait until a save has started and has written a file whose name starts with `prefix`; empty: no file needed."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for path in directory.glob(".tmp-*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not prefix or any(name.startswith(prefix) for name in os.listdir(path)):
                    return
    raise TimeoutError(f"no {prefix}* in a partial directory of {directory}")


@pytest.mark.slow
def test_writer_killed_in_any_phase_leaves_complete_checkpoints(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    save(CheckpointStore(tmp_path), 2)
    for phase in ("", "actor", "checkpoint"):
        writer = start_writer(tmp_path, "endless")
        wait_for_partial(tmp_path, phase)
        kill(writer)
        store = CheckpointStore(tmp_path)
        assert names(tmp_path) == ["step_000001", "step_000002"]
        for step in store.list():
            checkpoint = store.open(step)
            if "number" in checkpoint.info:
                number = checkpoint.info["number"]
                assert checkpoint.load("data") == {"number": number}
                assert checkpoint.load("actor")["w"].unique().tolist() == [number]


def test_opening_a_store_keeps_partial_directories_of_this_process(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.begin(1) as first, store.begin(2) as second:
        CheckpointStore(tmp_path)
        save_state([1], first / "a")
        save_state([2], second / "a")
    assert (store.open(1).load("a"), store.open(2).load("a")) == ([1], [2])


def test_states_can_be_loaded_without_store(tmp_path):
    save(CheckpointStore(tmp_path), 4)
    assert load_state(tmp_path / "step_000004" / "data") == {"row": 16}
