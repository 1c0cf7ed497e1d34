"""What a contributor starts from: one screen of rules, the container, the hooks and the templates."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".launch" / "bin"
MAKEFILE = (ROOT / "Makefile").read_text()
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"


def hooks():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]  # no download
    return config["repos"][0]["hooks"]


def test_contributing_is_one_screen_and_names_lanes_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 45
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert {"fix", "test", "test-runs", "test-vllm", "test-all", "test-gpu"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


def test_files_of_the_walk_through_a_step_exist():
    text = (ROOT / "docs/contributing.md").read_text()
    shown = text.partition("## Where is what")[2].partition("\n## Tests")[0]
    names = re.findall(r"`([a-z_/]+(?:\.py|\.md|/))`", shown)
    assert len(names) > 25
    assert [name for name in names if not ((ROOT / "src/hybridflow" / name).exists() or (ROOT / name).exists())] == []


def test_hooks_run_what_make_fix_does_from_the_environment_of_the_project():
    recipe = re.search(r"^fix:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in hooks()][: len(commands)] == commands
    assert all((hook["language"], hook["pass_filenames"]) == ("system", False) for hook in hooks())


def test_container_and_templates_are_complete():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    dockerfile = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).read_text()
    assert f" AS {container['build']['target']}\n" in dockerfile
    assert re.search(r"^setup:", MAKEFILE, re.MULTILINE)
    assert container["postCreateCommand"].endswith("make setup")
    copied = {word for line in re.findall(r"^COPY (.*)", dockerfile, re.MULTILINE) for word in line.split()[:-1]}
    assert copied == set(re.findall(r"^!(.*)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    for form in ("bug.yml", "feature.yml"):
        fields = yaml.safe_load((TEMPLATES / form).read_text())
        ids = [part["id"] for part in fields["body"] if part["type"] != "markdown"]
        assert fields["name"]
        assert len(ids) == len(set(ids)) > 1


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: tools of other programs")
def test_hooks_and_templates_work_with_their_own_tools(tmp_path):
    if not TOOLS.exists():
        pytest.skip("the tools are not installed in .launch; run `make .launch`, or `make test-all`.")
    check = [TOOLS / "check-jsonschema", "--builtin-schema"]
    forms = [TEMPLATES / "bug.yml", TEMPLATES / "feature.yml"]
    subprocess.run([*check, "vendor.github-issue-forms", *forms], check=True)
    subprocess.run([*check, "vendor.github-issue-config", TEMPLATES / "config.yml"], check=True)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
    for name in (".pre-commit-config.yaml", "pyproject.toml", "src/hybridflow/errors.py"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    environment = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "cache")}
    commit = [TOOLS / "pre-commit", "run", "--all-files"]
    changed = clone / "src/hybridflow/errors.py"
    changed.write_text(changed.read_text() + "import os,sys\n")
    assert subprocess.run(commit, cwd=clone, env=environment).returncode == 1  # the hook has repaired the file
    assert changed.read_bytes() == (ROOT / "src/hybridflow/errors.py").read_bytes()
    assert subprocess.run(commit, cwd=clone, env=environment).returncode == 0
