"""What modules import: how much the algorithm reaches, and that none import each other in a circle."""

import ast
from pathlib import Path

import hybridflow

SRC = Path(hybridflow.__file__).parents[1]
MOST_FILES, MOST_LINES = 66, 8_757
"""These may only fall; an import that would grow them belongs in an argument of `PPO`."""


def path_of(module):
    path = SRC.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def imported(module, *, with_types=False):
    """Yield (module, name) for each name of ours that a module imports, also inside functions.

    What it imports for types alone is left out, unless `with_types`.
    """
    nodes = list(ast.parse(path_of(module).read_text("utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not with_types:
            nodes += node.orelse
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridflow"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("hybridflow"))
        else:
            nodes += ast.iter_child_nodes(node)


def defining(module, name):
    """Return the module in which a name is defined that another module takes from a package."""
    if name and path_of(f"{module}.{name}"):
        return f"{module}.{name}"
    if path_of(module).name == "__init__.py":
        for source, other in imported(module):
            if other == name:
                return defining(source, other)
    return module


def closure(start):
    found, waiting = set(), [start]
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += [defining(*each) for each in imported(module)]
    return found


def test_the_algorithm_reaches_few_files_and_few_lines():
    files = [path_of(module) for module in closure("hybridflow.trainers.ppo")]
    num_lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
    assert len(files) <= MOST_FILES
    assert num_lines <= MOST_LINES
    rooms = {path.relative_to(SRC).parts[1] for path in files}
    assert rooms <= {
        *("algorithms", "config", "controller", "errors.py", "protocol", "runtime", "trainers", "workers"),
    }


def test_no_modules_import_each_other_in_a_circle():
    files = [path for path in (SRC / "hybridflow").rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.relative_to(SRC).with_suffix("").parts) for path in files}
    arrows = {module: {defining(*each) for each in imported(module, with_types=True)} for module in modules}
    arrows = {module: (found & modules) - {module} for module, found in arrows.items()}
    while leaves := {module for module, found in arrows.items() if not found}:
        arrows = {module: found - leaves for module, found in arrows.items() if module not in leaves}
    assert sorted(arrows) == []  # these are in a circle, or import one that is
