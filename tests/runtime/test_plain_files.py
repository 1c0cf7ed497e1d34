import os

import pytest

from hybridflow.runtime import open_plain_file, require_plain_file, require_regular_file


@pytest.fixture
def paths(tmp_path):
    """Make a file of each kind, named after it."""
    (tmp_path / "a regular file").write_bytes(b"abc")
    (tmp_path / "a symbolic link").symlink_to("a regular file")
    (tmp_path / "dangling").symlink_to("missing")
    (tmp_path / "a directory").mkdir()
    os.mkfifo(tmp_path / "a FIFO")
    return tmp_path


def test_only_a_regular_file_is_plain_and_opened(paths):
    require_plain_file(paths / "a regular file")
    with open_plain_file(paths / "a regular file") as file:
        assert file.read() == b"abc"
    for kind in ("a symbolic link", "a directory", "a FIFO"):
        for function in (require_plain_file, open_plain_file):
            with pytest.raises(OSError, match=rf"/{kind}' is {kind}, not a regular file"):
                function(paths / kind)
    with pytest.raises(OSError, match="is a symbolic link"):
        require_plain_file(paths / "dangling")
    with pytest.raises(OSError, match="is a device, not a regular file"):
        open_plain_file("/dev/null")
    require_plain_file(paths / "missing")
    with pytest.raises(FileNotFoundError):
        open_plain_file(paths / "missing")


def test_a_regular_file_may_be_behind_a_link_or_missing(paths):
    for name in ("a regular file", "a symbolic link", "missing"):
        require_regular_file(paths / name)
    for path in (paths / "a FIFO", "/dev/null"):
        with pytest.raises(OSError, match="is a pipe, device or socket; expected a file"):
            require_regular_file(path)
    with pytest.raises(IsADirectoryError, match="is a directory; expected a file"):
        require_regular_file(paths)
