"""Checkpoints of a run: published as a whole, checked when opened, pruned, and not lost to a failed or killed save."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.checkpoint import Checkpoint, CheckpointStore, open_checkpoint, save_state, saved_files
from hybridflow.errors import CheckpointError


def save(store: CheckpointStore, step: int, value: float | None = None) -> None:
    with store.begin(step, info={"fingerprint": "abc", "epoch": step // 10}) as directory:
        save_state({"model": {"w": torch.full((8,), float(step if value is None else value))}}, directory / "actor")
        save_state({"row": step * 4}, directory / "data")


def saved(directory: Path, *steps: int, keep: int = 9) -> CheckpointStore:
    store = CheckpointStore(directory, keep=keep)
    for step in steps:
        save(store, step)
    return store


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def value_of(checkpoint: Checkpoint | None) -> float:
    assert checkpoint is not None
    return checkpoint.load("actor")["model"]["w"][0].item()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def test_checkpoint_has_step_info_and_components(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert (store.list(), store.latest(), store.directory.exists()) == ((), None, False)
    save(store, 20)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.directory == tmp_path / "checkpoints" / "step_000020"
    assert (checkpoint.step, checkpoint.info) == (20, {"fingerprint": "abc", "epoch": 2})
    assert checkpoint.components == ("actor", "data")
    assert checkpoint.load("data") == {"row": 80}
    assert checkpoint.load("actor", "model")["w"].tolist() == [20.0] * 8
    files = [f"{component}.{kind}" for component in ("actor", "data") for kind in ("json", "safetensors")]
    assert names(checkpoint.directory) == sorted(["checkpoint.json", *files])
    with pytest.raises(CheckpointError, match="has no component 'critic'; it has actor, data"):
        checkpoint.load("critic")
    copy = checkpoint.directory.rename(tmp_path / "best")
    assert value_of(open_checkpoint(copy)) == 20.0
    with pytest.raises(CheckpointError, match=r"missing/checkpoint\.json' is missing, so"):
        open_checkpoint(tmp_path / "missing")


def test_components_may_be_in_subdirectories(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.begin(1) as directory:
        (directory / "critic").mkdir()
        save_state([1], directory / "critic" / "rank_0")
    assert store.open(1).components == ("critic/rank_0",)
    assert store.open(1).load("critic/rank_0") == [1]


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["save", "fail", "damage", "prune"])), max_size=7),
)
def test_a_store_keeps_the_newest_checkpoints_and_the_newest_valid_one(tmp_path_factory, keep, operations):
    """Compare with a dictionary of steps; pruning counts what has all its files, and keeps the newest valid one."""
    store, model = CheckpointStore(tmp_path_factory.mktemp("store"), keep=keep), {}
    for number, (step, operation) in enumerate(operations):
        if operation == "save":
            save(store, step, value=number)
            model[step] = float(number)
        elif operation == "fail":
            with pytest.raises(ZeroDivisionError), store.begin(step) as directory:
                (directory / "actor.json").write_text(str(1 / 0))
        elif operation == "damage" and step in model:
            flip_a_bit(store.path(step) / "data.json")
            model[step] = None
        elif operation == "prune":
            store.prune()
        valid = [step for step, value in model.items() if value is not None]
        if operation in ("save", "prune"):
            newest = sorted(model)[-keep:]
            kept = {*newest, *([max(valid)] if valid else [])}
            assert kept <= set(store.list()) <= set(model)
            assert len(store.list()) <= max(keep, len(kept))
            model = {step: value for step, value in model.items() if step in store.list()}
        assert store.list() == tuple(sorted(model))
        for step, value in model.items():
            if value is not None:
                assert value_of(CheckpointStore(store.directory).open(step)) == value


def test_steps_are_ordered_as_numbers_and_saving_again_replaces(tmp_path):
    store = saved(tmp_path, 1, 2, 3, 1_000_000, 12_345_678, keep=2)
    assert names(tmp_path) == ["step_1000000", "step_12345678"]
    with store.begin(12_345_678) as directory:
        save_state({"model": {"w": torch.tensor([2.0])}}, directory / "actor")
    assert value_of(store.latest()) == 2.0
    assert store.open(12_345_678).components == ("actor",)


def test_incomplete_checkpoints_are_neither_counted_nor_pruned(tmp_path):
    store = saved(tmp_path, 1, 2, keep=2)
    (tmp_path / "step_000002" / "data.json").unlink()
    save(store, 3)
    assert store.list() == (1, 2, 3)
    save(store, 4)
    assert store.list() == (2, 3, 4)


def test_newest_valid_checkpoint_is_not_pruned(tmp_path):
    saved(tmp_path, 1, 2, 3, 60)
    for step in (2, 3, 60):
        flip_a_bit(tmp_path / f"step_{step:06d}" / "data.json")
    store = CheckpointStore(tmp_path, keep=1)
    store.prune()
    assert store.list() == (1, 60)
    save(store, 40)  # below a damaged newer step
    assert store.list() == (40, 60)
    assert value_of(store.open(40)) == 40.0


def test_other_files_in_directory_are_not_touched(tmp_path):
    others = ["step_12", "step_0000012", "step_000012.bak", "notes.txt", ".tmp-mine", ".tmp-other-0123456789abcdef"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step_000099").write_text("a file")
    assert saved(tmp_path, 1, 2, keep=1).list() == (2,)
    assert names(tmp_path) == sorted([*others, "step_000099", "step_000002"])


def test_exceptions_of_a_writer_are_raised_and_nothing_remains(tmp_path):
    store = saved(tmp_path, 1, keep=1)
    with pytest.raises(KeyboardInterrupt), store.begin(2):
        raise KeyboardInterrupt
    message = r"step 2 was not saved: state\['f'\] is a function.* untouched, the newest is '.*step_000001'"
    with pytest.raises(CheckpointError, match=message), store.begin(2) as directory:
        save_state({"f": lambda: 1}, directory / "actor")
    assert names(tmp_path) == ["step_000001"]


def write_or_link(path: Path, secret: Path) -> None:
    secret.write_text("{}")
    path.symlink_to(secret) if path.name == "link.json" else path.write_bytes(b"x")


@pytest.mark.parametrize("name", ["model.pt", "actor.pkl", "actor.py", "notes", "link.json"])
def test_only_plain_safetensors_and_json_are_allowed_in_checkpoint(tmp_path, name):
    message = rf"step 1 was not saved: .*{name}' is not a plain"
    with pytest.raises(CheckpointError, match=message), CheckpointStore(tmp_path / "c").begin(1) as directory:
        write_or_link(directory / name, tmp_path / "secret.json")
    assert names(tmp_path / "c") == []


@pytest.mark.parametrize("info", [{"a": (1, 2)}, {1: 2}, {"a": torch.tensor(1)}, {"a": float("nan")}])
def test_info_changed_by_json_is_an_error(tmp_path, info):
    with pytest.raises(CheckpointError, match="info="), CheckpointStore(tmp_path).begin(1, info=info):
        pass
    assert names(tmp_path) == []


def test_invalid_arguments_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0 is invalid: expected a positive number"):
        CheckpointStore(tmp_path, keep=0)
    message = "step=-1 is invalid: expected 0 or a positive number"
    with pytest.raises(CheckpointError, match=message), CheckpointStore(tmp_path).begin(-1):
        pass
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 30 in .*; there are none"):
        CheckpointStore(tmp_path).open(30)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 30 in .*; there are 10, 20"):
        saved(tmp_path, 10, 20).open(30)


# --- damage -----------------------------------------------------------------------------------------------------------


def damage_manifest(directory: Path, **changes: object) -> None:
    document = json.loads((directory / "checkpoint.json").read_text())
    (directory / "checkpoint.json").write_text(json.dumps(document | changes))


def replace(path: Path, kind: str) -> None:
    """Replace a file by a directory, a FIFO, or a link to an equal file or directory."""
    path.rename(path.parent.parent / "moved")
    if kind == "link":
        path.symlink_to(path.parent.parent / "moved")
    else:
        path.mkdir() if kind == "directory" else os.mkfifo(path)


JSON = "checkpoint.json"
DAMAGES = {
    "a missing file": (lambda d: (d / "data.json").unlink(), r"data\.json' is missing"),
    "a truncated file": (
        lambda d: os.truncate(d / "actor.safetensors", 40),
        r"actor\.safetensors' is damaged: it has 40 bytes, but was saved with \d+",
    ),
    "a flipped bit": (lambda d: flip_a_bit(d / "actor.safetensors"), r"actor\.safetensors' is damaged: its SHA-256 is"),
    "a directory": (lambda d: replace(d / "data.json", "directory"), r"json' is a directory, not a regular file"),
    "a FIFO": (lambda d: replace(d / "data.json", "FIFO"), r"data\.json' is a FIFO, not a regular file"),
    "a FIFO for the manifest": (lambda d: replace(d / JSON, "FIFO"), r"nt\.json' is a FIFO, not a regular file"),
    "a link": (lambda d: replace(d / "data.json", "link"), r"data\.json' is a symbolic link, not a regular file"),
    "an unlisted folder of shards": (
        lambda d: ((d / "actor").mkdir(), shutil.copy(d / "actor.safetensors", d / "actor" / "shard.safetensors")),
        r"actor/shard\.safetensors' is not listed in checkpoint\.json, so it is not of this checkpoint; remove it",
    ),
    "no manifest": (lambda d: (d / JSON).unlink(), r"checkpoint\.json' is missing, so .* is not a checkpoint"),
    "an empty manifest": (lambda d: (d / JSON).write_text(""), r"checkpoint\.json' cannot be read as JSON"),
    "a foreign manifest": (lambda d: (d / JSON).write_text('{"a": 1}'), "hybridflow did not write it"),
    "a changed manifest": (
        lambda d: damage_manifest(d, info={"epoch": 9}),
        r"checkpoint\.json' is damaged: its SHA-256 differs",
    ),
    "a newer format": (
        lambda d: damage_manifest(d, version=2),
        r"format version 2, but this hybridflow reads version 1; .*a newer one",
    ),
    "a renamed directory": (lambda d: (d.rename(d.with_name("x")), (d.parent / "step_000001").rename(d)), "of step 1;"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_error_names_file_once_and_previous_valid_checkpoint(tmp_path, damage):
    store = saved(tmp_path, 1, 20, 40)
    inflict, message = DAMAGES[damage]
    inflict(tmp_path / "step_000040")
    advice = r"move '.*step_000040' out of .* with trainer\.resume=auto"
    full_message = rf"{message}.*newest valid checkpoint before it is '.*step_000020'.*{advice}"
    fresh = CheckpointStore(tmp_path, keep=9)
    for either in (fresh, store):
        with pytest.raises(CheckpointError, match=full_message) as caught:
            either.latest()
    assert value_of(fresh.open(20)) == 20.0
    first, _, _ = str(caught.value).partition("The newest valid checkpoint before it")
    assert first.endswith(". ")
    assert not first.endswith(".. ")
    assert first.count(f"{tmp_path}/step_000040/") == 1 or "directory" in damage.replace("a directory", "")
    assert ("as JSON" in first) == (damage == "an empty manifest")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_any_truncated_or_flipped_byte_is_an_error_that_names_the_file(tmp_path_factory, data):
    store = saved(tmp_path_factory.mktemp("store"), 1)
    path = store.path(1) / data.draw(st.sampled_from(names(store.path(1))))
    contents = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(contents) - 1))
    contents[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(contents if data.draw(st.booleans()) else contents[:at])
    with pytest.raises(CheckpointError, match=f"{path.name}'"):
        store.open(1)


def test_link_in_place_of_a_checkpoint_is_an_error_and_is_not_pruned(tmp_path):
    elsewhere, store = saved(tmp_path / "elsewhere", 40), saved(tmp_path / "checkpoints", 20, keep=1)
    (tmp_path / "checkpoints" / "step_000040").symlink_to(elsewhere.path(40))
    with pytest.raises(CheckpointError, match=r"a symbolic link, not a directory.*before it is '.*step_000020'"):
        store.latest()
    save(store, 50)
    assert names(tmp_path / "checkpoints") == ["step_000040", "step_000050"]
    assert value_of(elsewhere.latest()) == 40.0


def test_error_skips_other_damaged_checkpoints(tmp_path):
    saved(tmp_path / "c", 1, 2, 3)
    for step in (3, 2):
        flip_a_bit(tmp_path / "c" / f"step_00000{step}" / "data.json")
    with pytest.raises(CheckpointError, match=r"newest valid checkpoint before it is '.*step_000001'"):
        CheckpointStore(tmp_path / "c").latest()
    for step in (3, 2):  # moving damaged ones away resumes from the one before
        (tmp_path / "c" / f"step_00000{step}").rename(tmp_path / str(step))
    assert value_of(CheckpointStore(tmp_path / "c").latest()) == 1.0
    flip_a_bit(tmp_path / "c" / "step_000001" / "data.json")
    with pytest.raises(CheckpointError, match=r"No earlier checkpoint is valid; start again in an empty trainer\.run"):
        CheckpointStore(tmp_path / "c").latest()


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"lists '{name}', which is not a file of a checkpoint")
          for name in ("../secret.json", "/etc/secret.json", "a/../../secret.json", "model.pt")),
        ("a\0.json", "cannot be read"),
        ("\ud800.json", "cannot be read"),
    ],
)  # fmt: skip
def test_manifest_cannot_refer_to_outside_files_or_code(tmp_path, name, message):
    directory = saved(tmp_path, 1).path(1)
    list_in_manifest(directory, **{name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory)


def test_listed_link_and_folder_of_a_link_are_not_followed(tmp_path):
    directory, outside = saved(tmp_path, 1).path(1), tmp_path / "outside"
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


# --- files that other processes wrote ---------------------------------------------------------------------------------


def test_files_that_ranks_report_are_not_read_again(tmp_path):
    store, reported = CheckpointStore(tmp_path), []
    with store.begin(10, saved=reported) as directory:
        files = save_state([1.0], directory / "actor")
        save_state([2.0], directory / "controller")
        reported += [file._replace(sha256="0" * 64) for file in saved_files(directory, files)]
    manifest = json.loads((store.path(10) / "checkpoint.json").read_text())
    assert manifest["files"]["actor.json"]["sha256"] == "0" * 64
    assert manifest["files"]["controller.json"] == entry_of(store.path(10) / "controller.json")
    with pytest.raises(CheckpointError, match=r"actor\.json' is damaged: its SHA-256"):
        store.open(10)


SHARED = r" on node .*on a file system that they share\. Earlier"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("actor.json", Path.unlink, rf"step 20 was not saved: '.*/actor\.json' is missing{SHARED}"),
        ("actor.json", lambda path: os.truncate(path, 3), rf"'.*/actor\.json' has 3 bytes{SHARED}"),
        ("actor.pt", lambda path: None, r"actor\.pt' is not a plain \.safetensors or \.json file"),
    ],
)
def test_a_checkpoint_without_files_of_a_rank_is_not_published(tmp_path, name, change, message):
    store, reported = saved(tmp_path, 10, keep=1), []

    def save_and_change():
        with store.begin(20, saved=reported) as directory:
            (directory / name).write_text("a rank's")
            reported.extend(saved_files(directory, [directory / name]))
            change(directory / name)

    with pytest.raises(CheckpointError, match=message):
        save_and_change()
    assert names(tmp_path) == ["step_000010"]
    assert value_of(store.latest()) == 10.0


# --- full and read-only disks -----------------------------------------------------------------------------------------


def save_large(directory: Path) -> None:
    save_state({"w": torch.zeros(100_000)}, directory / "actor")
    save_state({"w": torch.zeros(1 << 19)}, directory / "critic")


def fill_the_disk(directory: Path) -> None:
    """Leave no room for the manifest."""
    save_state([1], directory / "actor")
    with contextlib.suppress(OSError), open(directory / "filler.json", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


FULL_DISKS = {
    save_large: r"cannot write '.*/critic' \(2\.0 MiB needed, [\d.]+ KiB free on .*No space left on device.*",
    fill_the_disk: r".*No space left on device.* \([\d.]+ KiB were written, 0 bytes free on .*",
}


@pytest.mark.parametrize("write", FULL_DISKS)
def test_full_disk_during_save_keeps_earlier_checkpoint(small_disk, write):
    store = saved(small_disk / "checkpoints", 10)
    untouched = r"Earlier checkpoints are untouched, the newest is '.*step_000010'"
    message = rf"step 20 was not saved: {FULL_DISKS[write]}{untouched}"
    with pytest.raises(CheckpointError, match=message), store.begin(20) as directory:
        write(directory)
    assert names(store.directory) == ["step_000010"]
    save(store, 20)  # there is room again
    assert store.list() == (10, 20)


def test_read_only_disk_can_be_read_and_names_cause_when_written(small_disk):
    saved(small_disk, 10)
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
        time.sleep(1000)
else:  # in the middle of one write after another, the same two steps again and again
    number = 0
    while True:
        number += 1
        with store.begin(1 + number % 2, info={"number": number}) as directory:
            save_state({"w": torch.full((500_000,), float(number))}, directory / "actor")
            save_state({"number": number}, directory / "data")
"""


@pytest.fixture
def killed_writer(fork_server):
    """Return a context with a process that saves in a mode, and has written a file; it is killed at the end."""

    @contextlib.contextmanager
    def start(directory, mode, prefix):
        writer = fork_server.start(["-c", KILLED_WRITER, directory, mode], environment=os.environ)
        try:
            deadline = time.monotonic() + 300
            while not any(name.startswith(prefix) for path in directory.glob(".tmp-*") for name in listed(path)):
                assert time.monotonic() < deadline, f"no {prefix}* in a partial directory of {directory}"
                time.sleep(0.002)
            yield
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate()
            assert writer.returncode == -signal.SIGKILL
        finally:
            writer.discard()

    def listed(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return ["", *os.listdir(path)]
        return []

    return start


@pytest.mark.runs
@pytest.mark.own_run("grpo: a writer that is killed")
def test_leftovers_are_removed_only_after_their_writer_is_dead(tmp_path, killed_writer):
    saved(tmp_path, 1)
    with killed_writer(tmp_path, "between components", "actor.safetensors"):
        saved(tmp_path, 3)
        assert len(names(tmp_path)) == 3, "the directory of a live writer must be kept"
    assert len(names(tmp_path)) == 3
    assert value_of(CheckpointStore(tmp_path).open(1)) == 1.0
    assert names(tmp_path) == ["step_000001", "step_000003"]


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: writers that are killed")
def test_writer_killed_in_any_phase_leaves_complete_checkpoints(tmp_path, killed_writer):
    saved(tmp_path, 1, 2)
    for phase in ("", "actor", "checkpoint"):
        with killed_writer(tmp_path, "endless", phase):
            pass
        store = CheckpointStore(tmp_path)
        assert names(tmp_path) == ["step_000001", "step_000002"]
        for checkpoint in map(store.open, store.list()):
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
