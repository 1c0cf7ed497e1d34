import re
from pathlib import Path

from hybridflow import algorithms

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_examples_of_the_page_run_as_one_script():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    exec(compile("\n".join(blocks), PAGE.name, "exec"), {"__name__": "__main__"})


def test_the_page_names_everything_public_and_every_entry_of_the_tables():
    text = PAGE.read_text()
    tables = [algorithms.ADVANTAGES, algorithms.POLICY_LOSSES, algorithms.KL_ESTIMATORS, algorithms.AGGREGATIONS]
    for name in [*algorithms.__all__, *(name for table in tables for name in table)]:
        assert f"`{name}" in text or f"{name}(" in text, name
