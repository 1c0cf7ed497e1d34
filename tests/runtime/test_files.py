import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridflow.runtime.files import require_regular_file, sort_metadata, write_bytes_atomically, write_text_atomically
from hybridflow.runtime.plain_files import open_plain_file, require_plain_file


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_new_file_is_as_if_written_by_open(tmp_path):
    write_bytes_atomically(tmp_path / "a.bin", b"\x00\xff")
    assert (tmp_path / "a.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.bin"]  # no temporary file remains
    write_text_atomically(tmp_path / "a.txt", "é\r\n\n")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xa9\r\n\n"
    (tmp_path / "opened").touch()
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "opened").stat().st_mode
    with pytest.raises(FileNotFoundError):
        write_text_atomically(tmp_path / "missing" / "a.txt", "x")


def test_an_existing_file_is_replaced_for_new_readers_only(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old and longer")
    path.chmod(0o640)
    link.symlink_to(path)
    with open(path) as reader:
        write_text_atomically(link, "new")
        assert reader.read() == "old and longer"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()


def test_a_pipe_and_a_folder_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")  # a device is treated as a pipe, and must not be at risk here
    for name in ("pipe", "folder", "link"):
        with pytest.raises(OSError, match=r"is a (pipe, device or socket|directory); expected a file"):
            write_text_atomically(tmp_path / name, "new")
    assert names(tmp_path) == ["folder", "link", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_full_disk_keeps_the_old_file_and_no_partial_one(small_disk):
    path = small_disk / "a.bin"
    write_bytes_atomically(path, b"old")
    with pytest.raises(OSError, match="No space left") as caught:
        write_bytes_atomically(path, b"x" * (2 << 20))
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert names(small_disk) == ["a.bin"]


WRITER = """
import itertools, sys
from hybridflow.runtime.files import write_bytes_atomically
for number in itertools.count():
    write_bytes_atomically(sys.argv[1], bytes([number % 251]) * 3_000_000)
"""


@pytest.mark.runs
@pytest.mark.own_run("grpo: kills a process that writes one file")
def test_killed_writer_leaves_a_complete_file(tmp_path):
    path = tmp_path / "a.bin"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    deadline = time.monotonic() + 100
    while not (path.exists() and any(name.startswith(".a.bin.tmp-") for name in os.listdir(tmp_path))):
        assert writer.poll() is None
        assert time.monotonic() < deadline
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    data = path.read_bytes()
    assert len(data) == 3_000_000
    assert data == data[:1] * 3_000_000


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


METADATA = {name: name.upper() for name in "hgfedcba"} | {"unusual": 'é "quoted" \\ \x7f\u2028\n'}
"""Nine entries: the library writes them in one of 362,880 orders."""


def test_files_of_equal_contents_are_equal_after_sorting(tmp_path):
    tensors = {'a/"b"': torch.arange(4.0), "ü": torch.zeros(0, 2, dtype=torch.int8)}
    contents = set()
    for number in range(20):
        file = tmp_path / f"{number}"
        save_file(tensors, file, metadata=METADATA)
        sort_metadata(file)
        contents.add(file.read_bytes())
    (data,) = contents
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == sorted(METADATA)
    assert load_file(file).keys() == tensors.keys()
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in tensors.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == METADATA
