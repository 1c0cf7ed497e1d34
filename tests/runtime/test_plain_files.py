import os

import pytest

from hybridflow.runtime import open_plain_file, require_plain_file


def make(path, kind):
    if kind == "a symbolic link":
        path.with_name("target").write_text("x")
        path.symlink_to(path.with_name("target"))
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path = path.with_name("null")
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    return path


@pytest.mark.parametrize("kind", ["a symbolic link", "a directory", "a FIFO"])
def test_what_is_not_a_regular_file_is_named_and_not_opened(tmp_path, kind):
    path = make(tmp_path / "file", kind)
    for function in (require_plain_file, open_plain_file):
        with pytest.raises(OSError, match=rf"/file' is {kind}, not a regular file"):
            function(path)


def test_device_is_not_opened(tmp_path):
    try:
        path = make(tmp_path / "file", "a device")
    except PermissionError:
        pytest.skip("making a device needs root")
    with pytest.raises(OSError, match="is a device, not a regular file"):
        open_plain_file(path)


def test_dangling_link_is_a_symbolic_link(tmp_path):
    (tmp_path / "file").symlink_to(tmp_path / "missing")
    with pytest.raises(OSError, match="is a symbolic link"):
        require_plain_file(tmp_path / "file")


def test_regular_file_is_read_and_missing_file_is_allowed(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    require_plain_file(tmp_path / "file")
    with open_plain_file(tmp_path / "file") as file:
        assert file.read() == b"abc"
    require_plain_file(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        open_plain_file(tmp_path / "missing")
