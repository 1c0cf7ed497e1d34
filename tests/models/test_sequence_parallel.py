"""How heads are made up to what ranks can share; `tests/engines` checks the numbers."""

import pytest

from hybridflow.models.sequence_parallel import shared_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "repeats", "filled"),
    [
        (8, 8, 2, 1, 8),
        (8, 2, 2, 1, 8),
        (8, 2, 4, 2, 8),
        (8, 1, 8, 8, 8),
        (12, 2, 4, 2, 12),
        (14, 2, 2, 1, 14),
        (14, 2, 4, 7, 16),  # 14 heads cannot be shared by 4: each gets its own key, and two empty ones are added
        (3, 3, 2, 1, 4),
        (6, 2, 3, 3, 6),
        (32, 8, 16, 2, 32),
    ],
)
def test_heads_that_ranks_can_share_evenly(heads, kv_heads, ranks, repeats, filled):
    assert shared_heads(heads, kv_heads, ranks) == (repeats, filled)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 3), (14, 2), (16, 4), (15, 5)])
def test_every_query_finds_its_key_on_its_own_rank(heads, kv_heads, ranks):
    repeats, filled = shared_heads(heads, kv_heads, ranks)
    keys = [head // repeats for head in range(kv_heads * repeats)]
    keys += [None] * (filled - heads)
    assert filled % ranks == len(keys) % ranks == 0
    for rank in range(ranks):
        own_keys = keys[rank * len(keys) // ranks : (rank + 1) * len(keys) // ranks]
        for place in range(filled // ranks):
            head = rank * filled // ranks + place
            key = own_keys[place * len(own_keys) // (filled // ranks)]
            assert key == (head * kv_heads // heads if head < heads else None)
