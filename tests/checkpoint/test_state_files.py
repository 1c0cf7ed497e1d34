"""States on disk: two files, errors that name a file, and no code that is executed."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridflow.checkpoint import load_state, save_state
from hybridflow.checkpoint.saved_files import saved_files
from hybridflow.checkpoint.state import TENSOR_DTYPES
from hybridflow.errors import CheckpointError
from hybridflow.runtime.progress import progress

STATE = {"model": {"w": torch.arange(4.0), "b": torch.zeros(0)}, "step": 3, "betas": (0.9, 0.999)}


@pytest.fixture
def saved(tmp_path):
    save_state(STATE, tmp_path / "actor")
    return tmp_path / "actor"


def test_a_state_is_two_plain_files_that_may_have_dots_in_their_names(tmp_path):
    before = progress()
    files = save_state(STATE, tmp_path / "actor.v1")
    assert progress() > before
    before = progress()
    saved_files(tmp_path, files)
    assert progress() - before == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor.v1.json", "actor.v1.safetensors"]
    assert load_file(tmp_path / "actor.v1.safetensors")["model/w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert json.loads((tmp_path / "actor.v1.json").read_text()) == {
        "format": "hybridflow-state",
        "version": 1,
        "state": {
            "model": {"w": {"$tensor": "model/w"}, "b": {"$tensor": "model/b"}},
            "step": 3,
            "betas": {"$tuple": [0.9, 0.999]},
        },
    }
    loaded = load_state(tmp_path / "actor.v1")
    assert loaded["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (loaded["step"], loaded["betas"]) == (3, (0.9, 0.999))


def test_every_dtype_and_view_is_read_back_and_equal_states_give_equal_files(tmp_path):
    raw, base = torch.arange(96, dtype=torch.uint8).mul(37), torch.arange(10)  # modulo 256
    state = {str(dtype): (raw % 2 if dtype == torch.bool else raw).view(dtype) for dtype in TENSOR_DTYPES}
    state |= {"slice": base[3:5], "strided": base[::4], "empty": torch.zeros(0, 2, dtype=torch.bfloat16)}
    for name in ("a", "b"):
        save_state(state, tmp_path / name)
    for suffix in (".json", ".safetensors"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    result = load_state(tmp_path / "a")
    assert list(result) == list(state)
    for name, tensor in state.items():
        assert (result[name].dtype, result[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(result[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_single_entry_can_be_loaded(saved, tmp_path):
    assert list(load_state(saved, "model")) == ["w", "b"]
    assert load_state(saved, "step") == 3
    with pytest.raises(CheckpointError, match=r"actor\.json' has no entry 'modle'; it has model, step, betas"):
        load_state(saved, "modle")
    save_state([1, "a"], tmp_path / "position")
    assert load_state(tmp_path / "position") == [1, "a"]


def test_loaded_tensors_do_not_depend_on_file_and_tied_ones_are_shared(tmp_path):
    x = torch.full((100_000,), 7.0)
    save_state({"embed": x, "head": x}, tmp_path / "a")
    result = load_state(tmp_path / "a")
    result["embed"] += 1
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate(0)
    assert result["head"].sum().item() == 800_000.0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_state_that_cannot_be_written_is_an_error(tmp_path, small_disk):
    with pytest.raises(CheckpointError, match=r"state\['f'\] is a function"):
        save_state({"x": torch.ones(2), "f": lambda: 1}, tmp_path / "a")
    assert not list(tmp_path.glob("a*"))
    with pytest.raises(CheckpointError, match=r"actor' \(4\.0 MiB needed, 1\.0 MiB free .*No space left on device"):
        save_state({"x": torch.zeros(1 << 20)}, small_disk / "actor")
    with pytest.raises(CheckpointError, match=r"cannot write '.*missing/actor'.*No such file"):
        save_state({"x": 1}, tmp_path / "missing" / "actor")


class Exploit:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint was executed')",))


def test_a_pickle_is_rejected_and_not_executed(saved):
    tensors, tree = saved.with_suffix(".safetensors"), saved.with_suffix(".json")
    tensors.write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read as safetensors"):
        load_state(saved)
    torch.save({"w": Exploit()}, tensors)
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read as safetensors"):
        load_state(saved)
    tree.write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(CheckpointError, match=r"actor\.json' cannot be read as JSON"):
        load_state(saved)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.data())
def test_any_truncated_tensor_file_and_any_bad_byte_of_json_name_the_file(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damaged")
    save_state(STATE, directory / "actor")
    path = directory / data.draw(st.sampled_from(["actor.safetensors", "actor.json"]))
    contents = path.read_bytes()
    path.write_bytes(contents[: data.draw(st.integers(0, len(contents) - 1))])
    with pytest.raises(CheckpointError, match=rf"{path.name}'"):
        load_state(directory / "actor")


VERSION_1 = '{"format": "hybridflow-state", "version": 1, "state": '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "is JSON, but not a hybridflow-state"),
        ('{"state": 1}', "is JSON, but not a hybridflow-state"),
        (VERSION_1.replace("1", "2") + "1}", r"format version 2, but this hybridflow reads version 1.*newer"),
        (VERSION_1 + '{"$tensor": "q"}}', "the tensor 'q' is missing"),
        (VERSION_1 + '{"$float": "zzzzzzzzzzzzzzzz"}}', "does not match its tensors"),
    ],
)
def test_foreign_or_damaged_json_is_named_in_error(saved, text, message):
    saved.with_suffix(".json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"actor\.json'.*{message}"):
        load_state(saved)


def test_missing_file_is_named_in_error(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"critic\.json' is missing"):
        load_state(tmp_path / "critic")
    saved.with_suffix(".safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"actor\.safetensors' cannot be read"):
        load_state(saved)


@pytest.mark.parametrize("name", ["actor.json", "actor.safetensors"])
@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link"])
def test_fifo_and_link_in_place_of_a_file_are_named_in_error(saved, tmp_path, name, kind):
    (tmp_path / name).rename(tmp_path / "moved")
    if kind == "a FIFO":
        os.mkfifo(tmp_path / name)  # a read would wait for ever
    else:
        (tmp_path / name).symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=rf"{name}' is {kind}, not a regular file"):
        load_state(saved)
