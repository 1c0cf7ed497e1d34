"""Slices of weights, by real processes on gloo, equal the whole weights; planted bugs are errors on all ranks."""

import json

import pytest
import torch
from torch.distributed.tensor import Shard

from fixtures.layout_program import BY_ROWS, TIMEOUT_S, run_jobs
from fixtures.published_models import MODELS
from hybridflow.engines.resharding import checksum_of_box, plan_exchange, word_bytes
from hybridflow.models.loading import build_without_weights
from hybridflow.models.tensor_parallel import placement_of
from hybridflow.runtime.boxes import num_elements, part_of, whole_box

LAYOUTS = {
    "data 4, 2": {},
    "data 4, 4": {"engine_ranks": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "tensor 2": {"tensor": 2},
    "tensor 2, engine 4": {"tensor": 2, "engine_ranks": 4},
    "tensor 4": {"tensor": 4},
    "host": {"offload": "host"},
    "replicas 2": {"replicas": 2},
    "buckets": {"at_once": 20000},
}
TO_SENDER = {"engine_ranks": 0, "at_once": 5000}
SENDERS = {
    "sender": TO_SENDER,
    "sender, tensor 2": {**TO_SENDER, "tensor": 2, "dtype": "bfloat16"},
    "sender, replicas 2": {**TO_SENDER, "replicas": 2},
    "sender, adapters": {**TO_SENDER, "lora": 2, "dtype": "bfloat16"},
}
PLANTED = ("whole on one rank", "overlap", "gap", "bit", "rows")


def on_four_ranks(test):
    """Mark a test of slices that four processes exchange."""
    return pytest.mark.runs(pytest.mark.own_run("grpo: four ranks, and planted bugs")(test))


HELD = [((0, 2), (0, 6)), ((2, 4), (0, 6)), ((4, 6), (0, 6)), ((6, 8), (0, 6))]


def test_rows_come_only_from_the_ranks_that_hold_them():
    halves = [((0, 4), (0, 6)), ((4, 8), (0, 6))] * 2
    _, received = plan_exchange(HELD, halves, 0)
    assert received == [HELD[0], HELD[1], None, None]
    sent, received = plan_exchange(HELD, halves, 1)
    assert sent == [HELD[1], None, HELD[1], None]
    assert received == [None, None, HELD[2], HELD[3]]


def test_columns_come_from_every_rank():
    _, received = plan_exchange(HELD, [((0, 8), (0, 3)), ((0, 8), (3, 6))] * 2, 1)
    assert received == [(box[0], (3, 6)) for box in HELD]


def test_of_equal_shards_each_rank_uses_its_own_and_others_take_turns():
    held = [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]
    plans = [plan_exchange(held, [((0, 8),)] * 4, rank)[1] for rank in range(4)]
    assert [[rank for rank, box in enumerate(plan) if box] for plan in plans] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def chunk(box, dim, count, index):
    """Return one of `count` parts of a box along a dimension, all but the last of equal size."""
    first, end = box[dim]
    step = -(-(end - first) // count)
    part = min(first + index * step, end), min(first + (index + 1) * step, end)
    return (*box[:dim], part, *box[dim + 1 :])


def test_rank_of_a_7b_model_receives_a_quarter_of_the_bytes(tmp_path):
    """Qwen2.5-7B in bfloat16 on 8 ranks, two engines of 4: 3.3 GB in place of 13.3 GB, on average over the ranks."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-7B"][0]))
    shapes = {name: p.shape for name, p in build_without_weights(tmp_path, "policy", torch.bfloat16).named_parameters()}
    gathered = received = 0
    for name, shape in shapes.items():
        whole, placement = whole_box(shape), placement_of(name)
        held = [chunk(whole, 0, 8, rank) for rank in range(8)]
        gathered += sum(num_elements(whole) - num_elements(box) for box in held)
        dims = [placement.dim] if isinstance(placement, Shard) else []
        wanted = [chunk(whole, dims[0], 4, rank % 4) if dims else whole for rank in range(8)]
        for me in range(8):
            parts = plan_exchange(held, wanted, me)[1]
            received += sum(num_elements(box) for rank, box in enumerate(parts) if box and rank != me)
    assert gathered * 2 / 8 / 1e9 == pytest.approx(13.33, abs=0.005)
    assert received * 2 / 8 / 1e9 == pytest.approx(3.33, abs=0.005)


@pytest.fixture(scope="module")
def ranks(tiny_model, run_world, tmp_path_factory):
    """Return by layout and planted bug the names of weights with wrong elements, bytes and error of each rank."""
    model = tiny_model("qwen2", num_key_value_heads=4, intermediate_size=52, vocab_size=41)
    options = LAYOUTS | SENDERS | {"adapters": {"lora": 2}} | {plant: {"plant": plant} for plant in PLANTED}
    job = {"do": "reshard", "model": model, "dtype": "float32"}
    jobs = [(4, {"name": name, **job, **more}) for name, more in options.items()]
    job["model"] = tiny_model("qwen2_moe")
    jobs += [(4, {"name": "experts", **job}), (4, {"name": "experts apart", **job, "expert": 2})]
    done = run_jobs(run_world, tmp_path_factory.mktemp("resharding"), jobs)
    return {name: result.ranks for name, result in done.items()}


@on_four_ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_equal_the_parts_of_whole_weights(ranks, layout):
    for result in ranks[layout]:
        assert (result["wrong"], result["error"]) == ([], "")
        names = {name.split(".")[-2] for name in result["sliced_names"]}
        assert names == {"embed_tokens", "lm_head", "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@on_four_ranks
@pytest.mark.parametrize("layout", ["experts", "experts apart"])
def test_slices_of_experts_equal_the_parts_of_their_stacks(ranks, layout):
    for result in ranks[layout]:
        assert (result["wrong"], result["error"]) == ([], "")
        assert {"gate_up_proj", "down_proj"} <= {name.rpartition("experts.")[2] for name in result["sliced_names"]}


@on_four_ranks
@pytest.mark.parametrize(
    ("layout", "share"),
    [("data 4, 2", 1 / 2), ("data 4, 4", 1 / 4), ("bfloat16", 1 / 2), ("host", 1 / 2), ("tensor 4", 1 / 2)],
)
def test_ranks_receive_less_than_whole_weights(ranks, layout, share):
    whole, sliced = (sum(result[key] for result in ranks[layout]) for key in ("whole", "sliced"))
    assert sliced / whole == pytest.approx(share, abs=0.09)  # keys and norms are whole
    # With equal tensor parallel a rank needs the other half of its slice, which one rank along the data axis holds.
    assert all(result["sliced"] < 0.5 * result["whole"] for result in ranks["tensor 2"])


@on_four_ranks
def test_shards_of_the_host_are_gathered_on_the_device(ranks):
    for result in ranks["host"]:
        assert set(result["devices"]) == {"meta"}
        assert len(result["devices"]) >= len(result["sliced_names"])


@on_four_ranks
def test_the_groups_of_all_axes_have_the_timeout_of_the_default_group(ranks):
    for layout in ("data 4, 2", "tensor 2", "tensor 4"):
        assert ranks[layout][0]["timeouts"] == [TIMEOUT_S] * 3


@on_four_ranks
def test_parameters_of_a_bucket_are_one_exchange(ranks):
    """Of at most 20,000 bytes: embedding, q, v and o; gate, up and down; q, v, o and gate; up, down and head."""
    for alone, together in zip(ranks["data 4, 2"], ranks["buckets"], strict=True):
        assert (alone["exchanges"], together["exchanges"]) == (14, 4)
        assert together["sliced"] == alone["sliced"]


@on_four_ranks
@pytest.mark.parametrize("layout", SENDERS)
def test_only_the_sending_rank_receives_whole_weights(ranks, layout):
    sender, *others = ranks[layout]
    assert (sender["wrong"], sender["sliced_names"], sender["error"]) == ([], [], "")
    assert sender["sliced"] == sender["whole"]
    for other in others:
        assert (other["wrong"], other["error"], other["sliced"]) == ([], "", 0)
        assert len(other["sliced_names"]) == 27


@on_four_ranks
def test_weights_without_a_slice_on_every_rank_are_whole(ranks):
    for whole, adapters in zip(ranks["whole on one rank"], ranks["adapters"], strict=True):
        assert whole["wrong"] == adapters["wrong"] == adapters["sliced_names"] == []
        assert BY_ROWS not in whole["sliced_names"]
        assert whole["sliced_names"]


@on_four_ranks
def test_slices_that_are_not_the_whole_weight_are_errors(ranks):
    for overlap, gap in zip(ranks["overlap"], ranks["gap"], strict=True):
        assert overlap["error"] == (
            f"weight '{BY_ROWS}': the ranks of the rollout engines load 960 elements in different slices, but the "
            "weight has 1664."
        )
        assert overlap["sliced_names"] == []
        assert gap["wrong"] == []  # each slice has the elements that the rank wanted
        assert f"1 weight(s), the first is '{BY_ROWS}', differ between" in gap["error"]


@on_four_ranks
@pytest.mark.parametrize("bug", ["bit", "rows"])
def test_elements_changed_on_one_rank_are_an_error_on_all(ranks, bug):
    assert all("differ between the trainer and the slices" in result["error"] for result in ranks[bug])
    assert [bool(result["wrong"]) for result in ranks[bug]] == [False, True, False, False]


def sum_of(tensor, box=None, num_bytes=None):
    whole = whole_box(tensor.shape)
    num_bytes = num_bytes or tensor.element_size()
    return int(checksum_of_box(part_of(tensor, whole, box or whole), box or whole, num_bytes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((8, 12), [((0, 3), (0, 12)), ((3, 8), (0, 4)), ((3, 8), (4, 12))]),
        ((10,), [((0, 3),), ((3, 3),), ((3, 10),)]),
        ((2, 4, 6), [((0, 2), (0, 4), (0, 2)), ((0, 1), (0, 4), (2, 6)), ((1, 2), (0, 4), (2, 6))]),
    ],
)
def test_sums_of_tiles_add_up_to_the_sum_of_the_whole(dtype, shape, tiles):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for num_bytes in {tensor.element_size(), word_bytes(tiles, tensor.element_size())}:
        parts = sum(sum_of(tensor, tile, num_bytes) for tile in tiles)
        assert (parts - sum_of(tensor, num_bytes=num_bytes)) % 2**64 == 0


def test_each_change_changes_the_sum_but_parts_do_not(monkeypatch):
    tensor = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    bit, signs = tensor.clone(), tensor.clone()
    bit.view(torch.int32)[2, 3] ^= 1
    signs[1:3] *= -1
    changes = [tensor, bit, signs, tensor.t(), tensor.roll(1, 0), tensor.roll(1, 1), tensor.flip(0)]
    for num_bytes in (4, 8):
        assert len({sum_of(change.contiguous(), num_bytes=num_bytes) for change in changes}) == len(changes)
    tiles = [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (2, 4))]
    assert len({sum_of(torch.ones(4, 4), tile) for tile in tiles}) == 4  # it depends on the position in the whole
    at_once = sum_of(tensor)
    monkeypatch.setattr("hybridflow.engines.resharding.PART", 10)
    assert sum_of(tensor) == at_once


def test_words_are_as_large_as_no_box_cuts_them():
    assert word_bytes([((0, 3), (0, 4)), ((0, 3), (4, 8))], 2) == 8
    assert word_bytes([((0, 3), (0, 2)), ((0, 3), (2, 8))], 2) == 4
    assert word_bytes([((0, 3),), ((3, 4),)], 2) == 2
    assert word_bytes([((0, 3),)], 8) == 8
    assert word_bytes([()], 4) == 4
    assert sum_of(torch.tensor(2.0)) == sum_of(torch.tensor([2.0]))
    assert sum_of(torch.zeros(0, 4)) == 0
