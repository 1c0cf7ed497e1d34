"""The page of a report: data, styles and scripts in one HTML file.

Texts of a run can run no code there. They are JSON in an element of data, from which scripts make text nodes only; and
the page's policy allows just the scripts whose hashes it names, and no request but, live, for the data.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybridflow.cli.inspect.report.page_data import page_data
from hybridflow.cli.output import write_derived_file
from hybridflow.runtime.observe.run_files import RunFiles

SCRIPTS = (
    "uPlot.iife.min.js",
    "elements.js",
    "runs.js",
    "curves.js",
    "rollouts.js",
    "sample.js",
    "timeline.js",
    "overview.js",
    "facts.js",
    "page.js",
)
POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; img-src data:; {connect}"
    "base-uri 'none'; form-action 'none'"
)
STYLES = ("uPlot.min.css", "page.css")


def write_report(runs: Sequence[RunFiles], output: Path) -> int:
    """Write the page of some runs to a file and return its size in bytes.

    Raises DataConfigError if that fails, and for a file of one of the runs that no report has written.
    """
    page = make_page([run.name for run in runs], to_page_json(page_data(runs)))
    write_derived_file(output, page, runs)
    return output.stat().st_size


def make_page(names: Sequence[str], data: str, *, is_live: bool = False) -> str:
    """Return the HTML of the page of runs of these names, with data of `to_page_json`.

    A live page asks its server for newer data.
    """
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest())
    return _asset("page.html").format(
        title=escape(" · ".join(names), quote=False),
        policy=POLICY.format(script=digest.decode(), connect="connect-src 'self'; " if is_live else ""),
        style="\n".join(_asset(name) for name in STYLES),
        data=data,
        live="true" if is_live else "false",
        script=script,
    )


def to_page_json(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end its element of a page: without any `<`, `>` or `&`."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return files("hybridflow.cli.inspect.report").joinpath("assets", name).read_text(encoding="utf-8")
