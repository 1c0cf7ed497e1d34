"""The check that every side made what it was asked for. Standard library only, since it runs in every environment."""

from collections.abc import Sequence


def require_lengths(made: Sequence[int], wanted: Sequence[int]) -> None:
    """RuntimeError unless each response has exactly the wanted number of tokens."""
    wrong = [i for i, (have, want) in enumerate(zip(made, wanted, strict=True)) if have != want]
    if wrong:
        i = wrong[0]
        raise RuntimeError(
            f"{len(wrong)} of {len(wanted)} responses have another length than asked for, the first is response {i} "
            f"with {made[i]} tokens instead of {wanted[i]}; something stopped it, so the times would not compare."
        )
