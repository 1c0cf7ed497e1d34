"""Resume from sharded checkpoints: bit-identical in the same layout of ranks, equal to 1e-10 in other layouts."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fixtures.layout_program import largest_errors, rows_for_losses, run_jobs
from fixtures.simulated_device import SimulatedDevice
from hybridflow.checkpoint import describe_state, load_state, read_state_into, save_state
from hybridflow.errors import CheckpointError

EXHAUSTIVE = pytest.mark.exhaustive


def sharded(test):
    """Mark a test of checkpoints of several ranks."""
    return pytest.mark.runs(pytest.mark.own_run("grpo: several ranks, and files of their shards")(test))


ACTIONS = {
    "two": (2, {"save": "by_two"}),
    "two_offloaded": (2, {"save": "by_two_offloaded", "offload": "idle"}),
    "two_copied": (2, {"save": "by_two_copied", "in_background": True}),
    "two_offloaded_again": (2, {"load": "by_two_offloaded", "offload": "idle"}),
    "two_again": (2, {"load": "by_two"}),
    "two_in_other_axes": (2, {"tensor": 2, "load": "by_two"}),
    "experts": (2, {"family": "qwen2_moe", "save": "by_experts"}),
    "experts_again": (2, {"family": "qwen2_moe", "load": "by_experts"}),
    "apart": (2, {"family": "qwen2_moe", "expert": 2, "load": "by_experts", "save": "by_apart"}),
    "apart_again": (2, {"family": "qwen2_moe", "expert": 2, "load": "by_apart"}),
    "two_copies": (2, {"replicas": 2, "load": "by_two", "save": "by_copies"}),
}
"""Name -> number of ranks and action, with shared directories, in order."""
MORE_ACTIONS = {
    "four": (4, {"tensor": 2, "save": "by_four", "in_background": True}),
    "four_again": (4, {"tensor": 2, "load": "by_four"}),
    "experts_on_four": (4, {"family": "qwen2_moe", "load": "by_experts"}),
    "experts_on_one": (1, {"family": "qwen2_moe", "load": "by_experts"}),
    "two_from_four": (2, {"load": "by_four"}),
    "one_from_two": (1, {"load": "by_two"}),
    "replicas": (4, {"replicas": 2, "save": "by_replicas"}),
    "replicas_again": (4, {"replicas": 2, "load": "by_replicas"}),
    "replicas_from_two": (4, {"replicas": 2, "load": "by_two"}),
    "replicas_from_four": (4, {"replicas": 2, "tensor": 2, "load": "by_four"}),
    "two_from_replicas": (2, {"load": "by_replicas"}),
    "one_from_replicas": (1, {"load": "by_replicas"}),
}


@pytest.fixture(scope="module")
def results(request, rollout_rows, tiny_model, run_world, tmp_path_factory):
    """Do the actions, those of four ranks and one only for exhaustive tests."""
    directory = tmp_path_factory.mktemp("resumed")
    rows_for_losses(rollout_rows).save_to_disk(directory / "rows")
    common = {"do": "resume", "rows": directory / "rows"}
    is_exhaustive = any(item.get_closest_marker("exhaustive") for item in request.session.items)
    jobs = []
    for name, (ranks, of_action) in (ACTIONS | (MORE_ACTIONS if is_exhaustive else {})).items():
        action = dict(of_action)
        paths = {what: directory / action[what] for what in ("load", "save") if what in action}
        if "save" in action:
            paths["save"].mkdir()
        model = tiny_model(action.pop("family", "qwen2"))
        jobs.append((ranks, {"name": name, "model": model, **common, **action, **paths}))
    done = run_jobs(run_world, directory, jobs)
    return SimpleNamespace(directory=directory, **{name: result.weights for name, result in done.items()})


def largest_error(weights, reference):
    return max(largest_errors(*(SimpleNamespace(weights=state) for state in (weights, reference))).values())


@sharded
@pytest.mark.parametrize(
    "ranks",
    [
        "two",
        "two_offloaded",
        "experts",
        "apart",
        pytest.param("four", marks=EXHAUSTIVE),
        pytest.param("replicas", marks=EXHAUSTIVE),
    ],
)
def test_same_layout_resumes_bit_identically(results, ranks):
    whole, resumed = getattr(results, ranks), getattr(results, f"{ranks}_again")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@sharded
@pytest.mark.parametrize(
    ("resumed", "saved_by"),
    [
        ("two_in_other_axes", "two"),
        ("two_copies", "two"),
        ("apart", "experts"),
        pytest.param("one_from_two", "two", marks=EXHAUSTIVE),
        pytest.param("experts_on_one", "experts", marks=EXHAUSTIVE),
        pytest.param("experts_on_four", "experts", marks=EXHAUSTIVE),
        pytest.param("two_from_four", "four", marks=EXHAUSTIVE),
        pytest.param("replicas_from_two", "two", marks=EXHAUSTIVE),
        pytest.param("replicas_from_four", "four", marks=EXHAUSTIVE),
        pytest.param("two_from_replicas", "replicas", marks=EXHAUSTIVE),
        pytest.param("one_from_replicas", "replicas", marks=EXHAUSTIVE),
    ],
)
def test_other_layouts_resume_with_equal_numbers(results, resumed, saved_by):
    assert largest_error(getattr(results, resumed), getattr(results, saved_by)) < 1e-10


@sharded
def test_background_save_holds_state_at_its_start(results):
    saved = load_state(results.directory / "by_two_copied" / "actor")
    assert saved["num_updates"] == 2
    assert largest_error(saved["model"], results.two_copied) > 1e-4  # the two steps after it


@sharded
@pytest.mark.parametrize("name", ["two_offloaded", "two_copied"])
def test_shards_saved_from_host_copies_are_the_same_bytes(results, name):
    files = sorted((results.directory / "by_two" / "actor").iterdir())
    others = sorted((results.directory / f"by_{name}" / "actor").iterdir())
    assert [file.name for file in files] == [file.name for file in others]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in others]
    assert all(torch.equal(results.two[n], weight) for n, weight in getattr(results, name).items())


@sharded
def test_each_rank_writes_its_shards_without_duplicates(results):
    directory = results.directory / "by_two" / "actor"
    files, whole, described = sorted(directory.iterdir()), load_state(directory), describe_state(directory)
    assert [file.suffix for file in files] == [".safetensors"] * 2  # nothing that could hold code
    numbers = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            numbers += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert list(header["__metadata__"]) == ["DCP_SHARDING_INFO", "format"]  # sorted
    moments = [moment for of_one in whole["optimizer"].values() for moment in of_one.values()]
    assert numbers == sum(tensor.numel() for tensor in [*whole["model"].values(), *moments])
    shapes = [{name: tensor.shape for name, tensor in state["model"].items()} for state in (described, whole)]
    assert shapes[0] == shapes[1]
    assert all(tensor.is_meta for tensor in described["model"].values())


@sharded
@pytest.mark.parametrize(("name", "ranks"), [("copies", 1), pytest.param("replicas", 2, marks=EXHAUSTIVE)])
def test_copies_of_the_weights_are_saved_once_by_adjacent_ranks(results, name, ranks):
    files = sorted(file.name for file in (results.directory / f"by_{name}" / "actor").iterdir())
    assert files == [f"shard-{number:05d}.safetensors" for number in range(1, ranks + 1)]


@sharded
def test_a_state_saved_by_copies_is_the_one_that_they_loaded(results):
    loaded, saved = (load_state(results.directory / name / "actor")["model"] for name in ("by_two", "by_copies"))
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in loaded)


def test_reading_fills_tensors_that_would_be_copied_to_be_saved(tmp_path):
    """As the step counts of a sharded optimizer on a GPU, which are plain tensors."""
    saved = {"a": torch.arange(6.0).view(2, 3), "step": torch.tensor(7.0), "part": torch.ones(2)}
    save_state(saved, tmp_path / "actor")
    whole = torch.zeros(5)
    state = {"a": torch.zeros(3, 2).T, "step": whole[4], "part": whole[:2]}
    read_state_into(state, tmp_path / "actor")
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    with SimulatedDevice():
        on_device = {name: torch.zeros_like(tensor, device="meta") for name, tensor in saved.items()}
        read_state_into(on_device, tmp_path / "actor")
        assert {name: tensor.tolist() for name, tensor in on_device.items()} == {
            name: tensor.tolist() for name, tensor in saved.items()
        }


def write_shards(directory, *shards):
    """Write a state of one tensor `model/w` in files of shards; a shard is (first row, number of rows, dtype)."""
    save_state({"model": {"w": torch.zeros(5, 2)}}, directory)
    directory.with_suffix(".safetensors").unlink()
    directory.mkdir()
    for number, (first, rows, dtype) in enumerate(shards):
        offsets = {"model/w": {"saved_offsets": [first, 0]}}
        contents = torch.arange(first, first + rows, dtype=dtype)[:, None].expand(rows, 2).contiguous()
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file({"model/w": contents}, directory / f"shard-{number}.safetensors", metadata=metadata)


def test_shards_are_assembled_by_their_offsets_in_their_dtype(tmp_path):
    write_shards(tmp_path / "actor", (3, 2, torch.int32), (0, 3, torch.int32))
    assert load_state(tmp_path / "actor", "model")["w"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert describe_state(tmp_path / "actor")["model"]["w"].dtype == torch.int32


def test_missing_or_damaged_file_of_shards_is_an_error(tmp_path):
    write_shards(tmp_path / "actor", (3, 2, torch.float32))
    message = "'model/w' has 10 elements, but its shards have 4; a file of shards is missing"
    with pytest.raises(CheckpointError, match=message):
        load_state(tmp_path / "actor")
    (tmp_path / "actor" / "shard-0.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match=r"shard-0\.safetensors' cannot be read as safetensors"):
        describe_state(tmp_path / "actor")
    (tmp_path / "actor" / "shard-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_state(tmp_path / "actor")


@pytest.mark.parametrize("read", [load_state, describe_state])
def test_shards_of_different_dtypes_are_an_error(tmp_path, read):
    write_shards(tmp_path / "actor", (0, 3, torch.float32), (3, 2, torch.int32))
    with pytest.raises(CheckpointError, match=r"'model/w' have different dtypes: torch\.float32, torch\.int32"):
        read(tmp_path / "actor")


SAVE_AGAIN = """
import sys, torch
from hybridflow.checkpoint.sharded_state import save_sharded_state
from hybridflow.engines.process_group import join_alone

join_alone()
for number in range(10):
    save_sharded_state({"model": {name: torch.arange(4.0) for name in "abc"}}, f"{sys.argv[1]}/{number}")
"""


@sharded
def test_equal_states_give_equal_files_of_shards(fork_server, tmp_path):
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        assert fork_server.run(["-c", SAVE_AGAIN, tmp_path / run]).returncode == 0
    files = list(tmp_path.glob("*/*/*.safetensors"))
    assert len(files) == 20
    assert len({file.read_bytes() for file in files}) == 1
    assert load_state(tmp_path / "first" / "0")["model"]["c"].tolist() == [0, 1, 2, 3]


ON_A_FULL_DISK = """
import sys, torch
from hybridflow.checkpoint.sharded_state import save_sharded_state
from hybridflow.engines.process_group import join_alone
from hybridflow.cli.exit_codes import exit_code
from hybridflow.errors import CheckpointError

join_alone()
try:
    save_sharded_state({"x": torch.zeros(1 << 20)}, sys.argv[1])
except CheckpointError as error:
    print(exit_code(error), error)
"""


@sharded
def test_full_disk_is_the_cause_of_the_error(fork_server, small_disk):
    done = fork_server.run(["-c", ON_A_FULL_DISK, small_disk / "actor"])
    assert done.stdout.startswith(f"75 cannot write '{small_disk}/actor' (")
    assert "No space left on device" in done.stdout


ON_TWO_NODES = """
import ctypes, sys, torch
import torch.distributed as dist
from hybridflow.checkpoint import save_sharded_state
from hybridflow.errors import CheckpointError

from fixtures.layout_program import leave

rank, directory, store = int(sys.argv[1]), sys.argv[3], dist.FileStore(sys.argv[2], 2)
libc = ctypes.CDLL(None, use_errno=True)
if rank == 1:  # the other node: a file system of its own in place of the directory's parent
    NEWNS, REC_PRIVATE = 0x20000, 0x44000
    parent = directory.rpartition("/")[0].encode()
    for call in (
        lambda: libc.unshare(NEWNS),
        lambda: libc.mount(None, b"/", None, REC_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", parent, b"tmpfs", 0, None),
    ):
        if call():
            raise OSError(ctypes.get_errno(), "cannot mount")
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
try:
    save_sharded_state({"x": torch.zeros(4)}, directory + "/actor")
except CheckpointError as error:
    print(error)
leave(store, 2)
"""


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: two nodes")
def test_a_node_without_the_directory_is_an_error_on_its_ranks(fork_server, small_disk, tmp_path):
    """`small_disk` is requested because it skips the test where nothing can be mounted."""
    directory = tmp_path / "run" / "checkpoint"
    directory.mkdir(parents=True)
    ranks = [
        fork_server.start(["-c", ON_TWO_NODES, rank, tmp_path / "store", directory], environment=os.environ)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.discard()
    (here, errors), (elsewhere, _) = outputs
    assert here == "", errors
    assert re.match(rf"node .+ has no '{directory}'\. All nodes write into one directory; put trainer", elsewhere)
    assert sorted(path.name for path in directory.rglob("*")) == ["actor", "actor.json", "shard-00001.safetensors"]
