"""The wheel builds offline, contains the package files, and runs from an empty directory."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for kind in ("py", "c", "h", "js", "css") for path in (ROOT / "src/hybridflow").rglob(f"*.{kind}")]
MODULES = [str(path.relative_to(ROOT / "src")) for path in SOURCES]
RECIPES = [str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.toml")]
EXAMPLES = [str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py")]
OTHERS = [
    "pyproject.toml",
    "README.md",
    "LICENSE",
    *(f"src/hybridflow/{name}" for name in ("py.typed", "cli/task/recipe.toml")),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel of a copy of the sources, since a build writes beside them."""
    copy = tmp_path_factory.mktemp("wheel")
    pages = [str(path.relative_to(ROOT)) for path in (ROOT / "src/hybridflow/observability/report/assets").iterdir()]
    for file in {*OTHERS, *RECIPES, *EXAMPLES, *pages, *(f"src/{module}" for module in MODULES)}:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes((ROOT / file).read_bytes())
    for name in ("recipes", "examples"):
        assert os.readlink(ROOT / "src/hybridflow" / name) == f"../../{name}"
        (copy / "src/hybridflow" / name).symlink_to(f"../../{name}")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", "out", "."], cwd=copy, check=True)
    (wheel,) = (copy / "out").glob("hybridflow-*.whl")
    return wheel


def test_wheel_contains_modules_data_type_marker_and_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "hybridflow = hybridflow.cli.main:command" in archive.read(entry_points).decode()
    assert {"hybridflow/py.typed", "hybridflow/cli/task/recipe.toml", *MODULES} <= names
    assert {f"hybridflow/{file}" for file in (*RECIPES, *EXAMPLES)} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_task_and_the_demo_run_from_an_empty_directory(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", site, wheel], check=True)

    def hybridflow(*arguments, cwd=empty):
        # The wheel stands before the sources; the other packages are those of this environment.
        variables = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "hybridflow", *arguments]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    hybridflow("init", "task")
    hybridflow("train", "recipe.toml", "trainer.total_steps=2", cwd=empty / "task")
    hybridflow("report", "runs/first", cwd=empty / "task")
    few = [part for name in ("--sft", "--grpo") for part in (name, "controller.threads=1")]
    few += ["--sft", "trainer.total_steps=3", "--sft", "offline.batch_size=32", "--grpo", "trainer.total_steps=1"]
    few += ["--grpo", "data.train_batch_size=8", "--grpo", "validation.max_samples=8"]
    assert "demo: accuracy" in hybridflow("demo", *few)
    program = "import hybridflow; from hybridflow.api.settings import recipe_files; print(recipe_files('dapo')[0])"
    command = [sys.executable, "-c", program]
    shown = subprocess.run(
        command, cwd=empty, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert shown.stdout.strip() == f"{site}/hybridflow/recipes/algorithms/dapo.toml"


def test_uv_installs_the_wheel_into_an_environment_of_its_own(wheel, tmp_path):
    """The other packages are those of this environment, since a test has no network."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    uv = [Path(sys.executable).with_name("uv"), "--offline", "--no-config"]
    variables = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "cache")}
    variables.pop("VIRTUAL_ENV", None)
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, environment], check=True, env=variables)
    python = environment / "bin/python"
    install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel]
    subprocess.run(install, check=True, env=variables)
    variables |= {"PYTHONPATH": sysconfig.get_path("purelib")}
    hybridflow, task = environment / "bin/hybridflow", empty / "task"
    where = "import hybridflow; print(hybridflow.__file__)"
    commands = [([hybridflow, "init", "task"], empty)]
    commands += [([hybridflow, "train", "recipe.toml", "trainer.total_steps=1"], task), ([python, "-c", where], empty)]
    for command, directory in commands:
        done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(environment))
