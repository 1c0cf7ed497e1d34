"""Repeating and padding heads so that ranks can split them evenly; `tests/engines` checks the numbers."""

import pytest

from hybridflow.models.sequence_parallel import shared_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "repeats", "padded"),
    [
        (8, 8, 2, 1, 8),
        (8, 2, 2, 1, 8),
        (8, 2, 4, 2, 8),
        (8, 1, 8, 8, 8),
        (12, 2, 4, 2, 12),
        (14, 2, 2, 1, 14),
        (14, 2, 4, 7, 16),  # 4 does not divide 14 heads: each gets its own key head, and two empty heads are added
        (3, 3, 2, 1, 4),
        (6, 2, 3, 3, 6),
        (32, 8, 16, 2, 32),
    ],
)
def test_heads_are_repeated_and_padded_for_an_even_split(heads, kv_heads, ranks, repeats, padded):
    assert shared_heads(heads, kv_heads, ranks) == (repeats, padded)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 3), (14, 2), (16, 4), (15, 5)])
def test_each_query_head_is_on_the_rank_of_its_key_head(heads, kv_heads, ranks):
    repeats, padded = shared_heads(heads, kv_heads, ranks)
    keys = [head // repeats for head in range(kv_heads * repeats)]
    keys += [None] * (padded - heads)
    assert padded % ranks == len(keys) % ranks == 0
    for rank in range(ranks):
        own_keys = keys[rank * len(keys) // ranks : (rank + 1) * len(keys) // ranks]
        for index in range(padded // ranks):
            head = rank * padded // ranks + index
            key = own_keys[index * len(own_keys) // (padded // ranks)]
            assert key == (head * kv_heads // heads if head < heads else None)
