import base64
import hashlib
import re

import pytest

from fixtures.report_runs import HOSTILE, write_run
from hybridflow.cli.inspect.report import make_page, page_data, write_report
from hybridflow.cli.inspect.report.page import to_page_json
from hybridflow.errors import HybridFlowError
from hybridflow.runtime.observe.run_files import RunFiles


def test_a_page_of_hostile_texts_has_one_script_and_no_address(tmp_path):
    run = RunFiles(write_run(tmp_path / "<b>run", texts=list(HOSTILE.values())))
    page = make_page([run.name], to_page_json(page_data([run])))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert "connect-src" not in policy
    assert "unsafe-eval" not in policy
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert not set(data) & {"<", ">", "&"}
    assert page.count("<script") == page.count("</script>") == 2
    assert "&lt;b&gt;run" in page
    addresses = set(re.findall(r"https?://[^\s\"')]+", page))
    assert addresses <= {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe|script)[^>]*(src|href)=\"(?!data:)", page)
    own = script[script.index('"use strict";\n// Elements') :]
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert name not in own


def test_json_of_a_page_is_ascii_without_signs_of_html():
    assert to_page_json({"a": "</script>&\u2028é"}) == r'{"a":"\u003c/script\u003e\u0026\u2028\u00e9"}'


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    runs = [RunFiles(write_run(tmp_path / "r\udcffn", steps=1))]
    with pytest.raises(HybridFlowError, match=r"missing/a\.html cannot be written: No such file or directory\.$"):
        write_report(runs, tmp_path / "missing" / "a.html")
    with pytest.raises(HybridFlowError, match=r"--output=.* cannot be written"):
        write_report(runs, tmp_path)
    assert write_report(runs, tmp_path / "a.html") == (tmp_path / "a.html").stat().st_size > 50_000
    assert r"<title>r\udcffn" in (tmp_path / "a.html").read_text("utf-8")


def test_no_file_of_a_run_is_replaced(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    kept = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert "metrics.jsonl" in {path.name for path in kept}
    for path in kept:
        with pytest.raises(HybridFlowError, match=rf"--output={path} is a file of the run"):
            write_report([RunFiles(run)], path)
    assert {path: path.read_bytes() for path in kept} == kept
    for _ in range(2):  # a page, and a file outside of the run, may be replaced
        write_report([RunFiles(run)], run / "report.html")
        (tmp_path / "other.html").write_text("")
        write_report([RunFiles(run)], tmp_path / "other.html")
