"""A pipe, a device and a folder are errors where a file is read or replaced."""

import os

import pytest

from hybridflow.runtime import require_regular_file


def test_a_file_a_link_to_one_and_nothing_are_accepted(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link", "absent"):
        require_regular_file(tmp_path / name)


def test_a_pipe_a_device_and_a_folder_are_errors(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(OSError, match="is a pipe, device or socket; expected a file"):
            require_regular_file(path)
    with pytest.raises(IsADirectoryError, match="is a directory; expected a file"):
        require_regular_file(tmp_path)
