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
from typing import Any

from packaging.requirements import Requirement

import hybridflow.controller.ray as package

SOURCES = sorted(Path(package.__file__).parent.glob("*.py"))
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def takes(*arguments: Any, **keywords: Any) -> Callable[[Any], bool]:
    """Return a check whether a function accepts these arguments."""

    def check(function: Any) -> bool:
        try:
            inspect.signature(function).bind(*arguments, **keywords)
        except TypeError:
            return False
        return True

    return check


def contains(*names: str) -> Callable[[Any], bool]:
    """Return a check whether the source of a function or class contains these names."""
    return lambda found: all(name in inspect.getsource(found) for name in names)


def is_bool(found: Any) -> bool:
    return isinstance(found, bool)


def is_console(found: Any) -> bool:
    """Return whether Ray's own class, which local_cluster.py replaces by a partial, starts new sessions."""
    cls = found.func if isinstance(found, functools.partial) else found
    return issubclass(cls, subprocess.Popen) and takes([], start_new_session=True)(cls)


PARTS: list[tuple[str, Callable[[Any], bool]]] = [
    ("ray._raylet:Config.initialize", callable),
    ("ray._raylet:AuthenticationTokenLoader.instance", callable),
    ("ray._raylet:AuthenticationTokenLoader.reset_cache", callable),
    ("ray._private.services:ConsolePopen", is_console),
    ("ray._private.services:start_ray_process", lambda found: "ConsolePopen" in found.__code__.co_names),
    ("ray._private.services:canonicalize_bootstrap_address", takes("auto")),
    ("ray._private.ray_constants:ENABLE_RAY_CLUSTER", is_bool),
    ("ray._private.ray_constants:RAY_ENABLE_UV_RUN_RUNTIME_ENV", is_bool),
    ("ray._private.node:Node.start_api_server", takes(None, include_dashboard=False, raise_on_failure=False)),
    ("ray._private.node:Node.gcs_address", lambda found: type(found) is property),
    ("ray._private.node:Node.raylet_socket_name", lambda found: type(found) is property),
    ("ray._private.worker:_global_node", lambda found: found is None or type(found).__name__ == "Node"),
    ("ray._private.worker:init", contains("_temp_dir")),
    ("ray._private.state:available_resources_per_node", takes()),
    ("ray.experimental.internal_kv:_internal_kv_put", takes("key", "value", overwrite=False, namespace="n")),
    ("ray.experimental.internal_kv:_internal_kv_get", takes("key", namespace="n")),
    ("ray.experimental.internal_kv:_internal_kv_exists", takes("key", namespace="n")),
    ("ray.experimental.internal_kv:_internal_kv_del", takes("prefix", del_by_prefix=True, namespace="n")),
    ("ray.experimental.internal_kv:internal_kv_get_gcs_client", takes()),
    ("ray._raylet:InnerGcsClient.internal_kv_put", callable),
    ("ray._raylet:InnerGcsClient.internal_kv_multi_get", callable),
    ("ray._raylet:InnerGcsClient.internal_kv_del", callable),
    ("ray.actor:ActorHandle._actor_id", lambda found: found is not None),
    ("ray.actor:ActorClass", contains("__ray_metadata__", "modified_class")),
    ("ray.actor:_modify_class", contains("__ray_ready__")),
]
"""A private attribute of Ray, and the property on which the code relies."""


def test_private_attributes_of_ray_have_the_expected_properties():
    wrong = []
    for name, is_as_expected in PARTS:
        module, _, path = name.partition(":")
        try:
            found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            wrong.append(f"{name}: {error}")
            continue
        if not is_as_expected(found):
            wrong.append(f"{name}: {found!r}")
    assert not wrong, "adapt controller/ray and PARTS, or lower the bound of ray in pyproject.toml"


def test_the_installed_ray_version_is_tested():
    import ray

    listed = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (requirement,) = [requirement for requirement in map(Requirement, listed) if requirement.name == "ray"]
    assert any(bound.operator == "<" for bound in requirement.specifier), "private attributes are used"
    assert ray.__version__ in requirement.specifier, "run the tests of controller/ray with it, and raise the bound"


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
