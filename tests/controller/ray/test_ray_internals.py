"""The private attributes of Ray that are used or patched, and the versions of Ray for which they were tested.

If they change after Ray's bound in pyproject.toml is raised, a failure here names the attribute. test_local_cluster.py
tests the environment variables (RAY_worker_niceness, RAY_AUTH_MODE and others) on a running cluster.
"""

import ast
import functools
import importlib
import inspect
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

import hybridflow.controller.ray as package

pytestmark = pytest.mark.ray

SOURCES = sorted(Path(package.__file__).parent.glob("*.py"))
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


class Part(NamedTuple):
    """A private attribute of Ray, the file that uses it, and the property that it must have."""

    module: str
    path: str
    used_by: str
    expects: str
    is_as_expected: Callable[[Any], bool]


def takes(*arguments: Any, **keywords: Any) -> Callable[[Any], bool]:
    """Return a check whether a function accepts these arguments."""

    def check(function: Any) -> bool:
        try:
            inspect.signature(function).bind(*arguments, **keywords)
        except TypeError:
            return False
        return True

    return check


def rays_own(found: Any) -> Any:
    """Return Ray's own class, which local_cluster.py replaces by a partial while this process runs a cluster."""
    return found.func if isinstance(found, functools.partial) else found


PARTS = [
    Part("ray._raylet", "Config.initialize", "local_cluster.py", "a callable", callable),
    Part("ray._raylet", "AuthenticationTokenLoader.instance", "local_cluster.py", "a callable", callable),
    Part("ray._raylet", "AuthenticationTokenLoader.reset_cache", "local_cluster.py", "a callable", callable),
    Part(
        "ray._private.services",
        "ConsolePopen",
        "local_cluster.py",
        "a subprocess.Popen with start_new_session",
        lambda found: issubclass(cls := rays_own(found), subprocess.Popen) and takes([], start_new_session=True)(cls),
    ),
    Part(
        "ray._private.services",
        "start_ray_process",
        "local_cluster.py",
        "a function that starts Ray's processes by ConsolePopen, looked up when it is called",
        lambda found: "ConsolePopen" in found.__code__.co_names,
    ),
    Part(
        "ray._private.services",
        "canonicalize_bootstrap_address",
        "cluster.py",
        "a function of an address",
        takes("auto"),
    ),
    Part(
        "ray._private.ray_constants",
        "ENABLE_RAY_CLUSTER",
        "local_cluster.py",
        "a bool",
        lambda found: isinstance(found, bool),
    ),
    Part(
        "ray._private.ray_constants",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
        "local_cluster.py",
        "a bool",
        lambda found: isinstance(found, bool),
    ),
    Part(
        "ray._private.node",
        "Node.start_api_server",
        "local_cluster.py",
        "a method that accepts keywords alone",
        takes(None, include_dashboard=False, raise_on_failure=False),
    ),
    Part(
        "ray._private.worker",
        "_global_node",
        "local_cluster.py",
        "None or the node that ray.init started",
        lambda found: found is None or type(found).__name__ == "Node",
    ),
    Part(
        "ray._private.worker",
        "init",
        "local_cluster.py",
        "ray.init with the keyword _temp_dir",
        lambda found: "_temp_dir" in inspect.getsource(found),
    ),
    *(
        Part(
            "ray._private.node", f"Node.{name}", "cluster_watch.py", "a property", lambda found: type(found) is property
        )
        for name in ("gcs_address", "raylet_socket_name")
    ),
    Part(
        "ray.experimental.internal_kv",
        "_internal_kv_put",
        "store.py",
        "a function of a key and a value",
        takes("key", "value", overwrite=False, namespace="n"),
    ),
    *(
        Part(
            "ray.experimental.internal_kv",
            f"_internal_kv_{name}",
            "store.py",
            "a function of a key",
            takes("key", namespace="n"),
        )
        for name in ("get", "exists")
    ),
    Part(
        "ray.experimental.internal_kv",
        "_internal_kv_del",
        "store.py",
        "a function of a key or a prefix",
        takes("prefix", del_by_prefix=True, namespace="n"),
    ),
    *(
        Part("ray._raylet", f"InnerGcsClient.{name}", "heartbeat.py", "a method", callable)
        for name in ("internal_kv_put", "internal_kv_multi_get", "internal_kv_del")
    ),
    Part("ray.experimental.internal_kv", "internal_kv_get_gcs_client", "heartbeat.py", "a function", takes()),
    Part(
        "ray._private.state",
        "available_resources_per_node",
        "resource_pool.py",
        "a function without arguments",
        takes(),
    ),
    Part(
        "ray.actor",
        "ActorHandle._actor_id",
        "waiting.py",
        "an attribute that is an ActorID",
        lambda found: found is not None,
    ),
    Part(
        "ray.actor",
        "ActorClass",
        "worker_group.py",
        "the result of ray.remote on a class, with __ray_metadata__.modified_class",
        lambda found: "__ray_metadata__" in inspect.getsource(found) and "modified_class" in inspect.getsource(found),
    ),
    Part(
        "ray.actor",
        "_modify_class",
        "backend.py",
        "a function that gives actors the method __ray_ready__",
        lambda found: "__ray_ready__" in inspect.getsource(found),
    ),
]


def require(part: Part) -> None:
    """Fail, with advice, unless the installed Ray has the attribute with the expected property."""
    import ray

    where = f"{part.module}.{part.path} of ray {ray.__version__}, used by controller/ray/{part.used_by},"
    advice = f"Adapt {part.used_by} and PARTS, run tests/controller/ray, or lower the bound of ray in pyproject.toml."
    try:
        found = functools.reduce(getattr, part.path.split("."), importlib.import_module(part.module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{where} does not exist ({error}). {advice}")
    if not part.is_as_expected(found):
        pytest.fail(f"{where} is not {part.expects}: {found!r}. {advice}")


def require_tested_version(version: str) -> None:
    """Fail, with advice, if this version of Ray is outside the bounds in pyproject.toml."""
    listed = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (ray,) = [requirement for requirement in map(Requirement, listed) if requirement.name == "ray"]
    assert any(bound.operator == "<" for bound in ray.specifier), (
        "ray needs an upper bound: private attributes are used"
    )
    if version not in ray.specifier:
        pytest.fail(
            f"ray {version} is outside ray{ray.specifier} in pyproject.toml. Install a tested version, or run "
            "tests/controller/ray with this one and raise the bound to just above it."
        )


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.module}.{part.path}")
def test_private_attributes_of_ray_have_the_expected_properties(part):
    require(part)


def test_the_installed_ray_version_is_tested():
    import ray

    require_tested_version(ray.__version__)


def test_failure_for_a_changed_attribute_names_it_and_the_fix(monkeypatch):
    import ray
    from ray._private import services, state

    by_name = {part.path: part for part in PARTS}
    monkeypatch.delattr(services, "ConsolePopen")
    with pytest.raises(pytest.fail.Exception) as gone:
        require(by_name["ConsolePopen"])
    name = f"ray._private.services.ConsolePopen of ray {ray.__version__}"
    assert str(gone.value).startswith(f"{name}, used by controller/ray/local_cluster.py, does not exist (")
    assert str(gone.value).endswith("or lower the bound of ray in pyproject.toml.")
    monkeypatch.setattr(state, "available_resources_per_node", lambda job: {})
    with pytest.raises(pytest.fail.Exception, match=r"_per_node of .* is not a function without arguments: "):
        require(by_name["available_resources_per_node"])


@pytest.mark.parametrize("version", ["2.59.0", "2.61.0", "3.0.0"])
def test_failure_for_an_untested_version_names_it_and_the_fix(version):
    with pytest.raises(pytest.fail.Exception, match=rf"ray {version} is outside ray.* raise the bound"):
        require_tested_version(version)


def private_names(tree: ast.AST) -> set[str]:
    """Return names with a leading underscore that are imported, read from an object, or passed as a keyword."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("ray"):
                private = "._" in module
                names |= {f"{module}.{name.name}" for name in node.names if private or name.name.startswith("_")}
            case ast.Import():
                names |= {name.name for name in node.names if name.name.startswith("ray.") and "._" in name.name}
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                is_of_python = name.startswith("__") and not name.startswith("__ray_")
                if name.startswith("_") and name.isidentifier() and not is_of_python:
                    names.add(name)
    return names


def own_names(tree: ast.AST) -> set[str]:
    """Return the names defined in a file: functions, classes, variables and attributes that are set."""
    names = {"_replace", "_exit"}  # of named tuples and of os
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_all_used_private_attributes_of_ray_are_listed():
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    own = set().union(*(own_names(ast.parse(path.read_text())) for path in SOURCES[0].parents[1].rglob("*.py")))
    used = set().union(*map(private_names, trees)) - own
    assert used == {
        "ray._raylet.AuthenticationTokenLoader",
        "ray._raylet.Config",
        "_internal_kv_del",
        "_internal_kv_exists",
        "_internal_kv_get",
        "_internal_kv_put",
        "ray._private.node",
        "ray._private.ray_constants",
        "ray._private.services",
        "ray._private.services.canonicalize_bootstrap_address",
        "ray._private.state.available_resources_per_node",
        "ray._private.worker",
        "_private",  # ray._private.worker._global_node
        "_global_node",
        "_temp_dir",
        "_actor_id",
        "__ray_metadata__",
        "__ray_ready__",
    }, "add a test of the new attribute to PARTS, and add its name here"
