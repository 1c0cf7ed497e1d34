"""Sdist and wheel build offline, contain the package files, and are installed from an index into a new environment."""

import functools
import os
import subprocess
import sys
import sysconfig
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("*.py", "*.md", "*.c", "*.h", "*.js", "*.css", "*.html", "py.typed", "recipe.toml")
SOURCES = [path for kind in KINDS for path in (ROOT / "src/hybridflow").rglob(kind)]
SHARED = [*(ROOT / "recipes").rglob("*.toml"), *(ROOT / "examples").glob("*.py")]

pytestmark = [pytest.mark.exhaustive, pytest.mark.own_run("grpo: installs the package elsewhere")]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build the sdist of a copy of the sources, since a build writes beside them."""
    copy = tmp_path_factory.mktemp("wheel")
    others = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    assets = (ROOT / "src/hybridflow/cli/inspect/report/assets").iterdir()
    for path in {*others, *SOURCES, *SHARED, *assets}:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for name in ("recipes", "examples"):
        assert os.readlink(ROOT / "src/hybridflow" / name) == f"../../{name}"
        (copy / "src/hybridflow" / name).symlink_to(f"../../{name}")
    (copy / "out" / "hybridflow").mkdir(parents=True)
    build = "import setuptools.build_meta; setuptools.build_meta.build_sdist('out/hybridflow')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = (copy / "out" / "hybridflow").iterdir()
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist):
    """Build the wheel of the sdist, into the same directory."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", sdist.parent, sdist], cwd=sdist.parent, check=True)
    (wheel,) = sdist.parent.glob("hybridflow-*.whl")
    return wheel


@pytest.fixture(scope="module")
def index(wheel):
    """Return the URL of a package index on the loopback interface: the pages of the directory of sdist and wheel."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=wheel.parents[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def output_of(command, directory, **variables):
    environment = {**os.environ, **variables}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_contains_modules_data_type_marker_and_command(wheel, sdist):
    assert sdist.name == wheel.name.replace("-py3-none-any.whl", ".tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "hybridflow = hybridflow.cli.main:command" in archive.read(entry_points).decode()
    assert {str(path.relative_to(ROOT / "src")) for path in SOURCES} <= names
    assert {f"hybridflow/{path.relative_to(ROOT)}" for path in SHARED} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_task_and_the_demo_run_from_an_empty_directory(index, tmp_path):
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    options = ["--quiet", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    output_of([environment / "bin/pip", "install", *options, "hybridflow"], empty, **settings)

    def python(*arguments, cwd=empty):
        # The other packages are those of this environment, since a test has no network.
        path = f"{environment}/lib/python{sysconfig.get_python_version()}/site-packages:{sysconfig.get_path('purelib')}"
        return output_of([environment / "bin/python", *arguments], cwd, PYTHONPATH=path, PYTHONSAFEPATH="1")

    python("-m", "hybridflow", "init", "task")
    python("-m", "hybridflow", "train", "recipe.toml", "trainer.total_steps=2", cwd=empty / "task")
    python("-m", "hybridflow", "report", "runs/first", cwd=empty / "task")
    few = [part for name in ("--sft", "--grpo") for part in (name, "controller.threads=1")]
    few += ["--sft", "trainer.total_steps=3", "--sft", "offline.batch_size=32", "--grpo", "trainer.total_steps=1"]
    few += ["--grpo", "data.train_batch_size=8", "--grpo", "validation.max_samples=8"]
    assert "demo: accuracy" in python("-m", "hybridflow", "demo", *few)
    program = "import hybridflow; from hybridflow.cli.api.settings import recipe_files; print(recipe_files('dapo')[0])"
    (installed,) = environment.glob("lib/python3*/site-packages/hybridflow")
    assert python("-c", program).strip() == f"{installed}/recipes/algorithms/dapo.toml"


def test_uv_installs_the_package_into_an_environment_of_its_own(index, tmp_path):
    """The other packages are those of this environment, since a test has no network."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    uv, cache = [Path(sys.executable).with_name("uv"), "--no-config"], str(tmp_path / "cache")
    output_of([*uv, "venv", "--quiet", "--python", sys.executable, environment], empty, UV_CACHE_DIR=cache)
    python, hybridflow = environment / "bin/python", environment / "bin/hybridflow"
    install = [
        *uv,
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        python,
        "--default-index",
        index,
        "hybridflow",
    ]
    output_of(install, empty, UV_CACHE_DIR=cache)
    packages = {"PYTHONPATH": sysconfig.get_path("purelib")}
    output_of([hybridflow, "init", "task"], empty, **packages)
    output_of([hybridflow, "train", "recipe.toml", "trainer.total_steps=1"], empty / "task", **packages)
    where = output_of([python, "-c", "import hybridflow; print(hybridflow.__file__)"], empty, **packages)
    assert where.startswith(str(environment))
