from collections.abc import Iterator

import pytest

from fixtures.hub import Hub, running_hub


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """Return a stand-in for the hub, which huggingface_hub uses with an empty cache, in an empty directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with running_hub(tmp_path / "cache", monkeypatch) as hub:
        yield hub
