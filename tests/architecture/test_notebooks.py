"""The notebooks of docs/notebooks run, show what they store, and become pages of the site."""

import json
import runpy

import pytest

from fixtures.notebooks import NOTEBOOKS, ROOT, executed, shown


@pytest.mark.runs
@pytest.mark.own_run("python: runs the cells that the notebook shows")
@pytest.mark.filterwarnings("ignore")  # of the packages of notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_stores(path, tmp_path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    for before, after in zip(cells, executed(path, tmp_path)["cells"], strict=True):
        if before["cell_type"] == "code":
            source = "".join(before["source"])
            assert shown(after) == shown(before), f"{source}\nto store it: python tests/fixtures/notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_was_executed_from_top_to_bottom(path):
    text = path.read_text("utf-8")
    assert len(text.encode()) < 60_000
    assert [place for place in ("/tmp/", "/home/", "/root/", "site-packages") if place in text] == []
    counts = [cell["execution_count"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert counts == [*range(1, len(counts) + 1)]


def test_a_notebook_is_a_page_of_the_site_with_code_outputs_and_links():
    hook = runpy.run_path(str(ROOT / "docs/theme/hook.py"))
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]},
        {"output_type": "display_data", "data": {"image/png": f"{'QUJD' * 999}\n"}},
        {"output_type": "execute_result", "data": {"text/plain": ["3"], "text/html": ["<b>3</b>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["[a](own_reward.ipynb) [b](../data.md)\n", "[c](../../README.md#start)"]},
        {"cell_type": "code", "source": ["print(1)\n", "3"], "outputs": outputs},
    ]
    text, path = json.dumps({"cells": cells}), "docs/notebooks/one.ipynb"
    assert hook["linked_files"](text, path) == ["docs/notebooks/own_reward.ipynb", "README.md"]
    assert hook["shown"](text, path).split("\n\n") == [
        "[a](own_reward.md) [b](../data.md)\n[c](../files/README.md#start)",
        "`````python\nprint(1)\n3\n`````",
        "`````text\none\ntwo\n`````",
        f"![output](data:image/png;base64,{'QUJD' * 999})",
        "`````text\n3\n`````",
    ]
