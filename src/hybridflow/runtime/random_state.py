"""The state of the global random generators of torch, numpy and Python, as tensors and plain values."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hybridflow.errors import CheckpointError
from hybridflow.runtime.alike import require_alike
from hybridflow.runtime.random_streams import derive_seed

logger = logging.getLogger(__name__)


def seed_random_state(seed: int) -> None:
    """Seed all global generators, so that code that draws from them, such as a user's reward, is reproducible."""
    import torch

    random.seed(derive_seed(seed, 0))
    np.random.seed(derive_seed(seed, 1) % 2**32)
    torch.manual_seed(derive_seed(seed, 2))


def capture_random_state() -> dict[str, Any]:
    """Return the state of all global generators: nested dictionaries of tensors, numbers, strings and None.

    CUDA generators are included once this process has used CUDA. Other generator objects are not included; their
    owners save them.
    """
    import torch

    version, words, gauss_next = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {numpy_state['bit_generator']}, but only MT19937 can be saved; "
            "do not replace it with np.random.set_bit_generator."
        )
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss_next": gauss_next},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: dict[str, Any], place: str = "the random state") -> None:
    """Restore the state of all global generators from `capture_random_state`.

    States of CUDA devices that this process lacks are skipped with a warning: the run continues, but its results are
    not bit-identical. Raises CheckpointError, naming `place`, for a state of other shapes, with nothing restored.
    """
    import torch

    require_alike(state, capture_random_state() | {"cuda": []}, place)
    python, numpy_state, cuda = state["python"], state["numpy"], state["cuda"]
    key = numpy_state["key"].numpy().astype(np.uint32)
    try:
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
        np.random.set_state(("MT19937", key, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"]))
        torch.set_rng_state(state["torch"])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{place} cannot be restored: {error}; the checkpoint is damaged.") from error
    devices = torch.cuda.device_count() if cuda else 0
    if devices != len(cuda):
        logger.warning(
            "The saved random state has %d CUDA devices, this process has %d: results will not be bit-identical.",
            len(cuda),
            devices,
        )
    for device, device_state in enumerate(cuda[:devices]):
        torch.cuda.set_rng_state(device_state, device)


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the state of the global generators after the block."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)
