"""The programs of docs/python.md as the cells of a notebook."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/python.md"


@pytest.mark.exhaustive
@pytest.mark.own_run("python: in a notebook")
@pytest.mark.filterwarnings("ignore")  # of the packages of notebooks
def test_the_page_runs_as_a_notebook_and_shows_its_progress(tmp_path):
    import nbformat  # not at the top: the environment of vLLM, which imports all tests, has no notebooks
    from nbconvert.preprocessors import ExecutePreprocessor

    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(program) for program in programs])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    ExecutePreprocessor(timeout=300, kernel_name="python3").preprocess(notebook, {"metadata": {"path": str(tmp_path)}})
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    shown = "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)
    assert "default  step 3/3  reward" in shown
    assert "<hybridflow train in 'runs/default': step 3 of 3, finished>" in shown
    assert (tmp_path / "runs/default/config.toml").exists()
