import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.checkpoint import load_state, save_state
from hybridflow.checkpoint.saved_files import saved_files
from hybridflow.checkpoint.state import TENSOR_DTYPES
from hybridflow.errors import CheckpointError
from hybridflow.runtime import progress

STATE = {"model": {"w": torch.arange(4.0), "b": torch.zeros(0)}, "step": 3, "betas": (0.9, 0.999)}


def test_state_is_saved_as_two_files_and_restored(tmp_path):
    save_state(STATE, tmp_path / "actor")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor.json", "actor.safetensors"]
    result = load_state(tmp_path / "actor")
    assert result["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert result["model"]["b"].shape == (0,)
    assert (result["step"], result["betas"]) == (3, (0.9, 0.999))


def test_progress_counts_written_and_hashed_files(tmp_path):
    before = progress()
    files = save_state(STATE, tmp_path / "actor")
    assert progress() > before
    before = progress()
    saved_files(tmp_path, files)
    assert progress() - before == 2


def test_every_dtype_is_read_back_bit_for_bit(tmp_path):
    raw = torch.arange(96, dtype=torch.uint8).mul(37)  # modulo 256
    state = {str(dtype): (raw % 2 if dtype == torch.bool else raw).view(dtype) for dtype in TENSOR_DTYPES}
    save_state(state, tmp_path / "a")
    result = load_state(tmp_path / "a")
    assert list(result) == list(state)
    for name, tensor in state.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8))


def test_views_and_empty_tensors_are_read_back(tmp_path):
    base = torch.arange(10)
    empty = [torch.zeros(0, n, dtype=torch.bfloat16) for n in range(3)]
    save_state({"slice": base[3:5], "strided": base[::4], "empty": empty}, tmp_path / "a")
    result = load_state(tmp_path / "a")
    assert result["slice"].tolist() == [3, 4]
    assert result["strided"].tolist() == [0, 4, 8]
    assert [(tuple(t.shape), t.dtype) for t in result["empty"]] == [((0, n), torch.bfloat16) for n in range(3)]


def test_state_without_tensors_is_restored(tmp_path):
    save_state([1, "a"], tmp_path / "position")
    assert load_state(tmp_path / "position") == [1, "a"]


def test_dots_in_file_names_are_kept(tmp_path):
    save_state(1, tmp_path / "actor.v1")
    assert (tmp_path / "actor.v1.json").exists()
    assert load_state(tmp_path / "actor.v1") == 1


def test_equal_states_give_equal_files(tmp_path):
    for name in ("first", "second"):
        save_state({"x": torch.ones(3), "y": torch.zeros(2, dtype=torch.int64), "z": [0.1]}, tmp_path / name)
    for suffix in (".json", ".safetensors"):
        assert (tmp_path / f"first{suffix}").read_bytes() == (tmp_path / f"second{suffix}").read_bytes()


def test_tensor_file_is_plain_safetensors(tmp_path):
    save_state(STATE, tmp_path / "actor")
    assert load_file(tmp_path / "actor.safetensors")["model/w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_single_entry_can_be_loaded(tmp_path):
    save_state(STATE, tmp_path / "actor")
    assert list(load_state(tmp_path / "actor", "model")) == ["w", "b"]
    assert load_state(tmp_path / "actor", "step") == 3
    with pytest.raises(CheckpointError, match=r"actor\.json' has no entry 'modle'; it has model, step, betas"):
        load_state(tmp_path / "actor", "modle")


def test_loaded_tensors_do_not_depend_on_file(tmp_path):
    save_state({"x": torch.full((100_000,), 7.0)}, tmp_path / "a")
    x = load_state(tmp_path / "a")["x"]
    x += 1
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate(0)
    assert x.sum().item() == 800_000.0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_tied_tensors_are_shared_after_loading(tmp_path):
    x = torch.ones(2)
    save_state({"embed": x, "head": x}, tmp_path / "a")
    result = load_state(tmp_path / "a")
    result["embed"][0] = 5
    assert result["head"].tolist() == [5.0, 1.0]


def test_unsupported_value_writes_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['f'\] is a function"):
        save_state({"x": torch.ones(2), "f": lambda: 1}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_error_gives_needed_and_free_space(small_disk):
    with pytest.raises(CheckpointError, match=r"actor' \(4\.0 MiB needed, 1\.0 MiB free .*No space left on device"):
        save_state({"x": torch.zeros(1 << 20)}, small_disk / "actor")


def test_missing_directory_is_named_in_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot write '.*missing/actor'.*No such file"):
        save_state({"x": 1}, tmp_path / "missing" / "actor")


class Exploit:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint was executed')",))


def test_pickle_named_safetensors_is_rejected_and_not_executed(tmp_path):
    save_state(STATE, tmp_path / "actor")
    (tmp_path / "actor.safetensors").write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read as safetensors"):
        load_state(tmp_path / "actor")
    torch.save({"w": Exploit()}, tmp_path / "actor.safetensors")
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read as safetensors"):
        load_state(tmp_path / "actor")
    (tmp_path / "actor.json").write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(CheckpointError, match=r"actor\.json' cannot be read as JSON"):
        load_state(tmp_path / "actor")


@pytest.mark.parametrize("length", [0, 7, 60, -1])
def test_truncated_tensor_file_is_named_in_error(tmp_path, length):
    save_state(STATE, tmp_path / "actor")
    path = tmp_path / "actor.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read as safetensors"):
        load_state(tmp_path / "actor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "is JSON, but not a hybridflow-state"),
        ('{"state": 1}', "is JSON, but not a hybridflow-state"),
        (
            '{"format": "hybridflow-state", "version": 2, "state": 1}',
            r"format version 2, but this hybridflow reads version 1.*newer",
        ),
        ('{"format": "hybridflow-state", "version": 1, "state": {"$tensor": "q"}}', "the tensor 'q' is missing"),
        (
            '{"format": "hybridflow-state", "version": 1, "state": {"$float": "zzzzzzzzzzzzzzzz"}}',
            "does not match its tensors",
        ),
    ],
)
def test_foreign_or_damaged_json_is_named_in_error(tmp_path, text, message):
    save_state(STATE, tmp_path / "actor")
    (tmp_path / "actor.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"actor\.json'.*{message}"):
        load_state(tmp_path / "actor")


def test_missing_file_is_named_in_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"actor\.json' is missing"):
        load_state(tmp_path / "actor")
    save_state(STATE, tmp_path / "actor")
    (tmp_path / "actor.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read"):
        load_state(tmp_path / "actor")


@pytest.mark.parametrize("name", ["actor.json", "actor.safetensors"])
@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link"])
def test_fifo_and_link_in_place_of_a_file_are_named_in_error(tmp_path, name, kind):
    save_state(STATE, tmp_path / "actor")
    (tmp_path / name).rename(tmp_path / "moved")
    if kind == "a FIFO":
        os.mkfifo(tmp_path / name)  # a read would wait for ever
    else:
        (tmp_path / name).symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=rf"{name}' is {kind}, not a regular file"):
        load_state(tmp_path / "actor")


def test_json_file_is_readable(tmp_path):
    save_state({"lr": 0.1, "betas": (0.9, 0.99)}, tmp_path / "a")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "format": "hybridflow-state",
        "version": 1,
        "state": {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}},
    }
