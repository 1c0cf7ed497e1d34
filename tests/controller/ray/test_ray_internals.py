"""The private attributes of Ray that are used or patched, and the versions of Ray for which they were tested.

Tests on a cluster show that they work; test_local_cluster.py the environment variables (RAY_AUTH_MODE and others).
"""

import ast
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import hybridflow.controller.ray as package

SOURCES = sorted(Path(package.__file__).parent.glob("*.py"))
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


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
        "ray._private.utils",
        "ray._private.worker",
        "_private",  # ray._private.worker._global_node
        "_global_node",
        "_temp_dir",
        "_actor_id",
        "__ray_metadata__",
        "__ray_ready__",
    }, "add the new attribute here, and a test on a cluster that needs it"
