"""The wheel builds offline and contains the package files."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_wheel_contains_modules_type_marker_and_command(tmp_path):
    sources = [path for kind in ("py", "c", "h") for path in (ROOT / "src/hybridflow").rglob(f"*.{kind}")]
    modules = [path.relative_to(ROOT / "src") for path in sources]
    recipes = [path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.toml")]
    others = [
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "src/hybridflow/py.typed",
        *map(str, recipes),
        "src/hybridflow/cli/task/recipe.toml",
    ]
    for file in [*others, *(f"src/{m}" for m in modules)]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    (tmp_path / "src/hybridflow/recipes").symlink_to("../../recipes")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", "out", "."], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "out").glob("hybridflow-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "hybridflow = hybridflow.cli.main:command" in archive.read(entry_points).decode()
    assert {"hybridflow/py.typed", *map(str, modules), *(f"hybridflow/{recipe}" for recipe in recipes)} <= names
    assert {"hybridflow/cli/task/recipe.toml", "hybridflow/cli/task/reward.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
