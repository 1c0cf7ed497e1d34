import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.main import main


def test_the_page_is_written_into_the_first_run_or_the_named_file(capsys, tmp_path):
    first, second = (write_run(tmp_path / name) for name in ("first", "second"))
    assert main(["report", str(first), str(second)]) == 0
    assert f"report: {first}/report.html (" in capsys.readouterr().out
    assert "<title>first · second · hybridflow</title>" in (first / "report.html").read_text()
    assert main(["report", str(first), "--output", str(tmp_path / "mine.html")]) == 0
    assert (tmp_path / "mine.html").is_file()


def test_a_page_does_not_go_through_a_link(capsys, tmp_path):
    run, other = write_run(tmp_path / "run", steps=1), tmp_path / "other"
    other.write_text("precious")
    (run / "report.html").symlink_to(other)
    assert main(["report", str(run)]) == 2
    assert "report.html' is a symbolic link" in capsys.readouterr().err
    assert other.read_text() == "precious"


@pytest.mark.parametrize("command", ["report", "watch"])
def test_what_is_not_a_run_is_an_error(command, capsys, tmp_path):
    assert main([command, str(tmp_path)]) != 0
    assert "is not the directory of a run: it has no run.json" in capsys.readouterr().err


def test_a_port_that_is_none_is_an_error(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), "--port", "70000"])
    assert "expected a port from 0 to 65535" in capsys.readouterr().err
