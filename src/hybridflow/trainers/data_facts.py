"""What a run records of its data sets, so that runs can be compared."""

from typing import Any

from hybridflow.data.loader import Dataset


def data_facts(**datasets: Dataset | None) -> dict[str, Any]:
    """Return the number of rows and the fingerprint of each data set by `NAME_rows` and `NAME_fingerprint`."""
    return {
        name: value
        for of, dataset in datasets.items()
        if dataset is not None
        for name, value in ((f"{of}_rows", len(dataset)), (f"{of}_fingerprint", dataset.fingerprint))
    }
