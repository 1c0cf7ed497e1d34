"""Resume from sharded checkpoints: bit-identical in the same layout of ranks, equal to 1e-10 in other layouts."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fixtures.simulated_device import SimulatedDevice
from hybridflow.checkpoint import describe_state, load_state, read_state_into, save_state
from hybridflow.errors import CheckpointError
from hybridflow.protocol import DataProto

PROGRAM = Path(__file__).parent / "resume_program.py"

WORLDS = {
    4: [
        ("four", {"tensor": 2, "save": "by_four", "in_background": True}),
        ("four_again", {"tensor": 2, "load": "by_four"}),
        ("four_in_other_axes", {"sequence": 2, "load": "by_four"}),
    ],
    2: [
        ("two_from_four", {"load": "by_four"}),
        ("two", {"save": "by_two"}),
        ("two_offloaded", {"save": "by_two_offloaded", "offload": "idle"}),
        ("two_copied", {"save": "by_two_copied", "in_background": True}),
        ("two_offloaded_again", {"load": "by_two_offloaded", "offload": "idle"}),
        ("two_again", {"load": "by_two"}),
        ("two_in_other_axes", {"tensor": 2, "load": "by_two"}),
    ],
    1: [
        ("one_from_four", {"load": "by_four"}),
        ("one", {"save": "by_one", "in_background": True}),
        ("one_again", {"load": "by_one"}),
    ],
    -2: [("two_from_one", {"load": "by_one"})],
}
"""Number of ranks -> actions in order, with shared directories. A negative number is a second world of that size."""


@pytest.fixture(scope="module")
def results(rollout_rows, tiny_model, run_world, tmp_path_factory):
    directory = tmp_path_factory.mktemp("resumed")
    batch = rollout_rows([3, 1, 5, 2, 4, 3, 1, 6, 2, 3], [4, 6, 1, 3, 6, 2, 5, 4, 3, 1], seed=1)
    generator = torch.Generator().manual_seed(2)
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns")
    noise = {
        n: torch.randn(batch.batch["response_mask"].shape, generator=generator, dtype=torch.float64) for n in names
    }
    batch.union(DataProto.from_dict(noise)).save_to_disk(directory / "rows")
    for key, actions in WORLDS.items():
        listed = []
        for name, options in actions:
            paths = {what: str(directory / options[what]) for what in ("load", "save") if what in options}
            axes = {axis: options[axis] for axis in ("tensor", "sequence", "offload") if axis in options}
            case = {"model": str(tiny_model("qwen2")), "rows": str(directory / "rows"), **axes}
            in_background = options.get("in_background", False)
            listed.append({"name": name, "case": case, "in_background": in_background, **paths})
        (directory / f"actions_{key}.json").write_text(json.dumps(listed))
        for options in (options for _, options in actions if "save" in options):
            (directory / options["save"]).mkdir()
        run_world(PROGRAM, abs(key), directory / f"actions_{key}.json", directory)
    names = [name for actions in WORLDS.values() for name, _ in actions]
    return SimpleNamespace(
        directory=directory, **{name: load_file(directory / f"{name}.safetensors") for name in names}
    )


def largest_error(weights, reference):
    assert weights.keys() == reference.keys()
    return max(float((weights[name] - value).norm() / value.norm()) for name, value in reference.items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["four", "two", "two_offloaded", "one"])
def test_same_layout_resumes_bit_identically(results, ranks):
    whole, resumed = getattr(results, ranks), getattr(results, f"{ranks}_again")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resumed", "saved_by"),
    [
        ("four_in_other_axes", "four"),
        ("two_from_four", "four"),
        ("one_from_four", "four"),
        ("two_in_other_axes", "two"),
        ("two_from_one", "one"),
    ],
)
def test_other_layouts_resume_with_equal_numbers(results, resumed, saved_by):
    assert largest_error(getattr(results, resumed), getattr(results, saved_by)) < 1e-10


@pytest.mark.slow
def test_background_save_holds_state_at_its_start(results):
    saved = load_state(results.directory / "by_four" / "actor")
    assert saved["num_updates"] == 2
    assert largest_error(saved["model"], results.four) > 1e-4  # the two steps after it
    assert largest_error(saved["model"], load_state(results.directory / "by_two" / "actor")["model"]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_offloaded", "two_copied"])
def test_shards_saved_from_host_copies_are_the_same_bytes(results, name):
    files = sorted((results.directory / "by_two" / "actor").iterdir())
    others = sorted((results.directory / f"by_{name}" / "actor").iterdir())
    assert [file.name for file in files] == [file.name for file in others]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in others]
    assert all(torch.equal(results.two[n], weight) for n, weight in getattr(results, name).items())


@pytest.mark.slow
def test_each_rank_writes_its_shards_without_duplicates(results):
    files = sorted((results.directory / "by_four" / "actor").iterdir())
    assert len(files) == 4
    assert {file.suffix for file in files} == {".safetensors"}  # nothing that could hold code
    whole = load_state(results.directory / "by_four" / "actor")
    numbers = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            numbers += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
    moments = [moment for of_one in whole["optimizer"].values() for moment in of_one.values()]
    assert numbers == sum(tensor.numel() for tensor in [*whole["model"].values(), *moments])


@pytest.mark.slow
def test_metadata_of_every_rank_is_sorted(results):
    files = [*(results.directory / "by_four" / "actor").iterdir(), *(results.directory / "by_two" / "actor").iterdir()]
    assert len(files) == 6
    for file in files:
        data = file.read_bytes()
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        assert list(metadata) == ["DCP_SHARDING_INFO", "format"]


@pytest.mark.slow
def test_described_state_has_shapes_without_contents(results):
    described = describe_state(results.directory / "by_four" / "actor")
    whole = load_state(results.directory / "by_four" / "actor")
    assert {n: tuple(t.shape) for n, t in described["model"].items()} == {
        n: tuple(t.shape) for n, t in whole["model"].items()
    }
    assert all(tensor.is_meta for tensor in described["model"].values())


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


def write_shards(directory, *shards, dtype=torch.float32):
    """Write one file per shard of the tensor `model/w`; a shard is (first row, number of rows)."""
    directory.mkdir()
    for number, (first, rows) in enumerate(shards):
        offsets = {"model/w": {"saved_offsets": [first, 0]}}
        save_file(
            {"model/w": torch.arange(first, first + rows, dtype=dtype)[:, None].expand(rows, 2).contiguous()},
            directory / f"shard-{number}.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(offsets)},
        )


def test_shards_are_assembled_by_their_offsets(tmp_path):
    save_state({"model": {"w": torch.zeros(5, 2)}}, tmp_path / "actor")
    (tmp_path / "actor.safetensors").unlink()
    write_shards(tmp_path / "actor", (3, 2), (0, 3))
    assert load_state(tmp_path / "actor", "model")["w"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_missing_file_of_shards_is_an_error(tmp_path):
    save_state({"model": {"w": torch.zeros(5, 2)}}, tmp_path / "actor")
    (tmp_path / "actor.safetensors").unlink()
    write_shards(tmp_path / "actor", (3, 2))
    with pytest.raises(
        CheckpointError, match="'model/w' has 10 elements, but its shards have 4; a file of shards is missing"
    ):
        load_state(tmp_path / "actor")
    (tmp_path / "actor" / "shard-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_state(tmp_path / "actor")


def test_damaged_file_of_shards_is_named(tmp_path):
    save_state({"model": {"w": torch.zeros(5, 2)}}, tmp_path / "actor")
    (tmp_path / "actor.safetensors").unlink()
    write_shards(tmp_path / "actor", (0, 5))
    (tmp_path / "actor" / "shard-0.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match=r"shard-0\.safetensors' cannot be read as safetensors"):
        describe_state(tmp_path / "actor")


def test_described_state_has_the_stored_dtypes(tmp_path):
    save_state({"model": {"w": torch.zeros(5, 2)}}, tmp_path / "actor")
    (tmp_path / "actor.safetensors").unlink()
    write_shards(tmp_path / "actor", (0, 3), (3, 2), dtype=torch.int32)
    assert describe_state(tmp_path / "actor")["model"]["w"].dtype == torch.int32


def test_shards_of_different_dtypes_are_an_error(tmp_path):
    save_state({"model": {"w": torch.zeros(5, 2)}}, tmp_path / "actor")
    (tmp_path / "actor.safetensors").unlink()
    write_shards(tmp_path / "actor", (0, 3), (3, 2))
    other = {"model/w": torch.ones(2, 2, dtype=torch.int32)}
    offsets = json.dumps({"model/w": {"saved_offsets": [3, 0]}})
    save_file(other, tmp_path / "actor" / "shard-1.safetensors", metadata={"DCP_SHARDING_INFO": offsets})
    for read in (load_state, describe_state):
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


def test_full_disk_is_the_cause_of_the_error(fork_server, small_disk):
    done = fork_server.run(["-c", ON_A_FULL_DISK, small_disk / "actor"])
    assert done.stdout.startswith(f"75 cannot write '{small_disk}/actor' (")
    assert "No space left on device" in done.stdout


ON_TWO_NODES = """
import ctypes, sys, torch
import torch.distributed as dist
from hybridflow.checkpoint import save_sharded_state
from hybridflow.errors import CheckpointError

rank, directory = int(sys.argv[1]), sys.argv[3]
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
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
try:
    save_sharded_state({"x": torch.zeros(4)}, directory + "/actor")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
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
