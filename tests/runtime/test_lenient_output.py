import io
import os

import pytest

from hybridflow.runtime.lenient_output import LenientOutput


@pytest.fixture
def pipe():
    """Return the writing end of a pipe, as a stream, whose reader is gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as stream:
        yield stream


def test_a_pipe_without_a_reader_raises_nothing_then_or_at_the_end(pipe):
    output = LenientOutput(pipe)
    print("lost", file=output, flush=True)
    assert isinstance(output.error, BrokenPipeError)
    print("more", file=output)
    pipe.flush()


def test_a_full_disk_and_a_closed_file_raise_nothing():
    with open("/dev/full", "w") as stream:
        full = LenientOutput(stream)
        full.writelines(["a\n", "b\n"])
        full.flush()
        assert isinstance(full.error, OSError)
        full.discard()
    full.write("closed")
    full.flush()


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"\\xe9\\u2014"), ("latin-1", b"\xe9\\u2014")])
def test_characters_that_a_terminal_cannot_show_are_escaped(encoding, shown):
    contents = io.BytesIO()
    output = LenientOutput(io.TextIOWrapper(contents, encoding=encoding))
    assert output.write("é—\udcff") == 3
    output.flush()
    assert contents.getvalue() == shown + b"\\udcff"
    assert (output.encoding, output.error) == (encoding, None)
