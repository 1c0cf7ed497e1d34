"""Checks of the documentation: its programs and commands run, its tables are up to date, and its links exist."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from importlib.metadata import metadata, requires
from pathlib import Path
from types import MethodType

import pytest
from packaging.requirements import Requirement
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fixtures.gpu_settings import sizes_of_models, step_table, tables
from fixtures.published_models import DENSE
from hybridflow import errors
from hybridflow.checkpoint import CheckpointStore
from hybridflow.cli.compatibility import TESTED
from hybridflow.cli.exit_codes import MEANINGS, code_of
from hybridflow.cli.main import COMMANDS, main
from hybridflow.config import load_config, reference_markdown, refusals_markdown
from hybridflow.data import prompt_row, write_prompt_file
from hybridflow.protocol import FIELDS
from hybridflow.runtime.observe import metrics_markdown
from hybridflow.runtime.observe.advice import findings_markdown
from hybridflow.trainers import build_trainer, ppo
from hybridflow.trainers.ppo import PPO

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted(ROOT.glob("docs/*.md"))
TEXTS = [*PAGES, *(path for rest in ("docs/*/*.md", "docs/*/*.ipynb", "*.md") for path in sorted(ROOT.glob(rest)))]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

OWN_RUN = pytest.mark.own_run("python: runs the programs that the page shows")
LANES = {
    **{
        f"{name}.md": [pytest.mark.runs, OWN_RUN]
        for name in ("environments", "offline_training", "python", "rewards", "training")
    },
    "ray.md": [pytest.mark.ray, pytest.mark.exhaustive, OWN_RUN],
}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


@pytest.fixture
def restore_process(restores_the_process):
    """Restore the process and the field glossary, which documentation programs may change."""
    glossary = dict(FIELDS)
    yield
    FIELDS.clear()
    FIELDS.update(glossary)


@pytest.mark.usefixtures("restore_process")
@pytest.mark.parametrize(
    "name",
    [pytest.param(p.name, marks=LANES.get(p.name, ())) for p in PAGES if PROGRAM.search(p.read_text("utf-8"))],
)
def test_programs_of_a_page_run_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page(name)
    namespace = {"__name__": f"docs_{Path(name).stem}"}
    for block in PROGRAM.finditer(text):
        blank_lines = text[: block.start(1)].count("\n")  # make traceback line numbers match the page
        exec(compile("\n" * blank_lines + block[1], name, "exec"), namespace)


def run_script(script: str, directory: Path) -> str:
    """Return what the shell prints that runs a script in a directory, without errors."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: runs the commands that the page shows")
def test_commands_of_the_tutorial_run(tmp_path):
    shown = run_script("".join(SCRIPT.findall(page("tutorial.md"))), tmp_path)
    assert "step 40/100" in shown
    assert "val/accuracy" in shown
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert (tmp_path / "curve.png").is_file()


@pytest.mark.runs
@pytest.mark.own_run("grpo: runs the first commands of the page")
def test_the_tutorial_begins_with_commands_that_run(tmp_path):
    script = "".join(SCRIPT.findall(page("tutorial.md"))[1:])  # without the task of `hybridflow init`
    preparing, training, _ = script.partition("hybridflow train recipe.toml --stop-after")
    run_script(f"{preparing}{training} 1", tmp_path)
    assert (tmp_path / "runs/tutorial/checkpoints").is_dir()


def test_reward_and_recipe_of_readme_are_valid(tmp_path):
    (tmp_path / "recipe.toml").write_text(re.findall(r"^```toml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[0])
    assert load_config(tmp_path / "recipe.toml").trainer.run_dir == "runs/mine"
    namespace = {}
    exec(PROGRAM.findall(README)[1], namespace)
    scores = [namespace["score"]("openai/gsm8k", text, "72", {})["score"] for text in ("It is #### 72\n", "#### 7")]
    assert scores == [1.0, 0.0]


def test_the_loop_in_the_architecture_is_the_source():
    loop = textwrap.dedent(inspect.getsource(PPO.step))
    shown = re.findall(r"```python source\n(.*?)```", page("architecture.md"), re.DOTALL)
    assert shown == [loop], f"put this into docs/architecture.md:\n{loop}"
    begin = page("architecture.md").partition("## Where to begin to read")[2].partition("\n## ")[0]
    files = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", begin)
    assert files
    assert [name for name in files if not (ROOT / "src/hybridflow" / name).is_file()] == []


@pytest.mark.usefixtures("restore_process")
def test_loop_in_readme_trains_as_the_source_does(tiny_model, tmp_path):
    (tmp_path / "reward.py").write_text("def score(solution_str, **_):\n    return sum(map(ord, solution_str)) % 7 / 6")
    rows = [
        prompt_row(data_source="words", prompt=f"w{i} w{i + 1}", ground_truth="", split="train", index=i)
        for i in range(3, 11)
    ]
    settings = [
        f"model.path={tiny_model()}",
        f"data.train_files=['{write_prompt_file(tmp_path / 'train.parquet', rows)}']",
        *("data.train_batch_size=4", "data.max_prompt_length=4", "data.max_response_length=6"),
        *("rollout.group_size=3", "actor.mini_batch_size=2", "actor.epochs=2", "actor.optimizer.lr=1e-2"),
        *("algorithm.kl_in_loss=true", "algorithm.kl_coef=0.1", "trainer.total_steps=2", "controller.threads=1"),
        *(f"reward.function={tmp_path}/reward.py:score", "reward.processes=0"),
    ]

    def trained(name, step=None):
        with build_trainer(load_config(None, [*settings, f"trainer.run_dir={tmp_path}/{name}"])) as trainer:
            if step is not None:
                trainer.step = MethodType(step, trainer)
            trainer.fit()
        checkpoint = CheckpointStore(tmp_path / name / "checkpoints").path(2)
        return (checkpoint / "actor.safetensors").read_bytes()

    namespace = dict(vars(ppo))
    exec(re.findall(r"```python\n(def step.*?)```", README, re.DOTALL)[0], namespace)
    assert trained("readme", namespace["step"]) == trained("source")


def test_every_command_is_documented(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = capsys.readouterr().out.partition("commands:\n")[2].partition("\n\n")[0]
    shown = page("commands.md")
    assert f"commands:\n{commands}\n```" in shown, f"put this into docs/commands.md:\n{commands}"
    assert re.findall(r"^\| `hybridflow ([a-z-]+)", shown, re.MULTILINE) == list(COMMANDS)
    targets = re.findall(r"^([a-z_-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert [target for target in targets if f"`make {target}`" not in shown] == []


def exit_codes_markdown():
    """Return the codes with their meanings and classes as a Markdown table."""
    rows, known = [], [*filter(inspect.isclass, vars(errors).values()), KeyboardInterrupt, Exception]
    for code, meaning in MEANINGS.items():
        classes = [f"`{cls.__name__}`" for cls in known if code_of(cls) is code]
        rows.append(f"| {code:d} | {meaning} | {', '.join(classes)} |")
    return "\n".join(["| status | meaning | errors |", "|---|---|---|", *rows]) + "\n"


def compatibility_markdown():
    """Return required and tested versions as a Markdown table."""
    needs = map(Requirement, requires("hybridflow") or ())
    required = {need.name: ",".join(sorted(map(str, need.specifier), reverse=True)) for need in needs}
    required["Python"] = metadata("hybridflow")["Requires-Python"]
    rows = [f"| {entry.name} | `{required[entry.name]}` | {entry.text()} | {entry.how} |" for entry in TESTED]
    return "\n".join(["| package | required | tested | with |", "|---|---|---|---|", *rows]) + "\n"


@pytest.mark.parametrize(
    ("name", "generate"),
    [
        ("configuration.md", reference_markdown),
        ("configuration.md", refusals_markdown),
        ("diagnose.md", findings_markdown),
        ("doctor.md", compatibility_markdown),
        ("metrics.md", metrics_markdown),
        ("training.md", exit_codes_markdown),
    ],
)
def test_tables_equal_the_generated_ones(name, generate):
    assert generate() in page(name), f"put this into docs/{name}:\n{generate()}"


def test_table_of_gpu_settings_equals_the_generated_one(tmp_path):
    models = sizes_of_models(tmp_path)
    assert tables(models) in page("gpu.md")
    assert step_table(models) in page("gpu.md"), step_table(models)


def test_page_shows_the_memory_that_the_command_prints(tmp_path, monkeypatch, capsys):
    kind, sizes, *_ = DENSE["gemma-3-1b"]
    CONFIG_MAPPING[kind](**sizes).save_pretrained(tmp_path / "models" / "gemma-3-1b")
    command, printed = re.search(r"^\$ hybridflow (memory .*)\n((?:.*\n)*?)```$", page("gpu.md"), re.MULTILINE).groups()
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_and_test_files_of_a_page_exist(text):
    links = [link.partition("#") for link in LINK.findall(text.read_text("utf-8")) if "://" not in link]
    targets = [(text.parent / path if path else text, anchor) for path, _, anchor in links]
    assert [str(path) for path, _ in targets if not path.exists()] == []
    assert [f"{path}#{anchor}" for path, anchor in targets if anchor and anchor not in _anchors(path)] == []
    named = re.findall(r"\btests/[a-z_/]+\.py", text.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_index_links_every_page():
    linked = LINK.findall(page("index.md"))
    assert [page.name for page in PAGES if page.name != "index.md" and page.name not in linked] == []


def _anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def quick_start(text: str) -> list[str]:
    """Return the commands of the quick start: setup, data, training on one GPU, training on eight."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    named = ("make setup", "prepare countdown", "recipes/gpu/")
    return [line for line in lines if any(part in line for part in named)]


def test_readme_has_the_quick_start_of_the_gpu_page():
    assert len(quick_start(page("gpu.md"))) == 4
    assert quick_start(README) == quick_start(page("gpu.md"))


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: runs the commands of the quick start")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ray)])
def test_quick_start_runs_with_a_tiny_model_on_the_cpu(ranks, tmp_path, tiny_model):
    hub_name = tmp_path / load_config(ROOT / "recipes/gpu/one_gpu.toml").model.path
    hub_name.parent.mkdir()
    hub_name.symlink_to(tiny_model(max_position_embeddings=512))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    _, data, *trainings = quick_start(page("gpu.md"))
    words = "'w3 w4 {numbers} {target} w5'"  # the tiny model knows no others
    small = (
        "model.dtype=float32 data.train_batch_size=2 data.max_response_length=4 validation.max_samples=2 "
        f"rollout.group_size=2 trainer.total_steps=1 memory.max_tokens_per_micro_batch=2048 "
        f"{'controller.num_workers=2' * (ranks > 1)}"
    )
    commands = [f"{data} --train-size 8 --test-size 2 --prompt-template {words}", f"{trainings[ranks - 1]} {small}"]
    run_script("\n".join(commands), tmp_path)
    assert (tmp_path / f"runs/{'gpu' if ranks == 1 else 'eight_gpus'}/metrics.jsonl").read_text()
