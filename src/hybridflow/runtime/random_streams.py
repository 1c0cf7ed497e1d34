"""Counter-based random numbers: each is a function of integer keys only.

Equal keys give equal bits in any order, on any machine and for any batch composition. Each key is mixed with the
finalizer of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") and chained into the
state of the keys before it.
"""

from typing import Any

import numpy as np

from hybridflow.errors import AlgorithmError

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

_UNIFORM_DOMAIN = 0x756E69666F726D00
_SEED_DOMAIN = 0x7365656400000000


def uniform(*keys: int | np.ndarray) -> np.ndarray:
    """Return one float64 in [0, 1) for each combination of keys, a multiple of 2**-53.

    Keys are integers or integer arrays (at least one) that broadcast; the result has their broadcast shape.
    Only the value of a key modulo 2**64 matters, not its dtype. `uniform(a, b)` and `uniform(b, a)` differ, and so do
    `uniform(a)` and `uniform(a, 0)`. Raises AlgorithmError for a key that is not an integer.
    """
    bits = _mixed_bits(_UNIFORM_DOMAIN, keys)
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def uniform_state(*keys: int | np.ndarray) -> np.ndarray:
    """Return the uint64 state of `uniform` after these keys, when exactly one more key follows.

    `hybridflow.rollout.sampling.uniform_after` adds the last key on any device.
    """
    return _mixed_bits(_UNIFORM_DOMAIN, keys, more=1)


def derive_seed(*keys: int) -> int:
    """Return a seed in [0, 2**63) for a separate generator, independent of `uniform` with the same keys."""
    bits = _mixed_bits(_SEED_DOMAIN, keys)
    if bits.ndim:
        raise AlgorithmError(
            f"derive_seed needs plain integers, but a key has shape {bits.shape}; call it once per seed."
        )
    return int(bits) >> 1


def _mixed_bits(domain: int, keys: tuple[Any, ...], *, more: int = 0) -> np.ndarray:
    """Return the state after these keys, of which `more` are still to follow."""
    if not keys:
        raise AlgorithmError("no key was given; give at least one integer key, for example uniform(seed, step).")
    state = np.asarray(domain + len(keys) + more, dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        state = _mix(state)
        for position, key in enumerate(keys):
            state = _mix(state ^ _mix(_as_uint64(position, key) + GOLDEN))
    return state


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIER_2
    return np.asarray(x ^ (x >> np.uint64(31)))


def _as_uint64(position: int, key: Any) -> np.ndarray:
    array = np.asarray(key)
    if array.dtype.kind == "u":
        return array.astype(np.uint64)
    if array.dtype.kind in "ib":
        return array.astype(np.int64).astype(np.uint64)
    raise AlgorithmError(
        f"key {position} is {key!r} of dtype {array.dtype}; "
        "keys must be integers from -2**63 to 2**64 - 1, or integer arrays."
    )
