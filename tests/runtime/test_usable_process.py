import os
import sys
from types import SimpleNamespace

import pytest

from hybridflow.errors import ConfigError
from hybridflow.runtime.usable_process import require_usable_process


def test_a_removed_working_directory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"working directory cannot be used .*change to another one"):
        require_usable_process()


def test_removed_docstrings_are_an_error(monkeypatch):
    require_usable_process()
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(ConfigError, match=r"^PYTHONOPTIMIZE=2 .*unset it, or use 1\.$"):
        require_usable_process()
