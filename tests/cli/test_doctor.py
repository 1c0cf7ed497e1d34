import pytest

from hybridflow import doctor
from hybridflow.cli.main import main
from hybridflow.doctor import Finding

FINE = Finding("ports", "ok", "one opens")
WRONG = Finding("versions", "error", "torch is missing", "install it")
SLOW = Finding("open files", "warning", "a process may open 5 files", "raise the limit")


@pytest.mark.parametrize(("findings", "status"), [([FINE], 0), ([FINE, SLOW], 0), ([FINE, WRONG, SLOW], 1)])
def test_an_error_sets_the_exit_status(monkeypatch, capsys, tmp_path, findings, status):
    monkeypatch.setattr(doctor, "run_checks", lambda directory: iter(findings if directory == tmp_path else ()))
    assert main(["doctor", "--dir", str(tmp_path)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok       ports           one opens"
    if status:
        assert lines[1:3] == ["error    versions        torch is missing", "         fix: install it"]
