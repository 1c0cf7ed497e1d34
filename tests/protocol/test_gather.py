import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.protocol import DataProto

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the results that two ranks of a gloo group wrote; see gather_rank.py."""
    folder = tmp_path_factory.mktemp("gather")
    script = Path(__file__).with_name("gather_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(WORLD_SIZE), folder], stderr=subprocess.PIPE)
        for rank in range(WORLD_SIZE)
    ]
    try:
        outcomes = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [code for _, code in outcomes] == [0] * WORLD_SIZE, outcomes
    return folder


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_every_rank_gets_all_rows_in_rank_order(folder, rank):
    data = DataProto.load_from_disk(folder / f"uneven{rank}")
    assert data.batch["half"].tolist() == [0.5, 1.5, 1.5]
    assert data.batch["turned"].tolist() == [[0, 1], [0, 2], [1, 3]]
    assert data.non_tensor_batch["o"].tolist() == [{"rank": 0}, {"rank": 1}, {"rank": 1}]
    assert data.non_tensor_batch["n"].tolist() == [0, 1, 1]
    assert data.meta_info == {"step": 3, "metrics": {"loss": [0.0, 1.0]}}


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_different_lengths_on_ranks_are_padded_by_the_glossary(folder, rank):
    data = DataProto.load_from_disk(folder / f"uneven{rank}")
    assert data.batch["responses"].tolist() == [[1, 0, 0], [2, 2, 2], [2, 2, 2]]
    assert data.batch["response_mask"].tolist() == [[True, False, False], [True] * 3, [True] * 3]


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_rank_without_rows_or_tensors_participates(folder, rank):
    assert DataProto.load_from_disk(folder / f"empty{rank}").batch["half"].tolist() == [1.5]
    objects = DataProto.load_from_disk(folder / f"objects{rank}")
    assert objects.non_tensor_batch["o"].tolist() == [{"rank": 0}, {"rank": 1}, {"rank": 1}]
    assert DataProto.load_from_disk(folder / f"metrics{rank}").meta_info == {"metrics": {"loss": [0, 1]}}


def test_conflicting_batches_raise_the_same_error_on_every_rank(folder):
    first, second = ((folder / f"errors{rank}").read_text().splitlines() for rank in range(WORLD_SIZE))
    assert first == second
    assert first[0].startswith("FieldError: all_gather: rank 0 has the tensors ['other', 'response_mask'")
    assert first[1].startswith("BatchError: concat: 'x' has different lengths")
    assert first[2].startswith("BatchError: concat: 'x' is (1,) torch.float32 on cpu in part 0")
    assert first[3].startswith("BatchError: concat: 'step' is 0 in one batch and 1")
