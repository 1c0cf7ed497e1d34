"""A check of response lengths. Standard library only, since it runs in every environment."""

from collections.abc import Sequence


def require_lengths(lengths: Sequence[int], requested: Sequence[int]) -> None:
    """Raise RuntimeError unless each response has exactly the requested number of tokens."""
    wrong = [i for i, (length, wanted) in enumerate(zip(lengths, requested, strict=True)) if length != wanted]
    if wrong:
        i = wrong[0]
        raise RuntimeError(
            f"{len(wrong)} of {len(requested)} responses have a wrong length; the first is response {i} with "
            f"{lengths[i]} tokens instead of {requested[i]}. Times would not be comparable: find out what stops it."
        )
