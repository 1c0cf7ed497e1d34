"""docs/architecture.md names the core and lists the loop; README shows its length and one step of GRPO."""

import inspect
import re
import textwrap
from pathlib import Path
from types import MethodType

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.data import prompt_row, write_prompt_file
from hybridflow.trainers import build_trainer, ppo
from hybridflow.trainers.ppo import PPO

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

REWARD = "def score(solution_str, **sample):\n    return sum(map(ord, solution_str)) % 7 / 6\n"


def core_files() -> list[Path]:
    section = ARCHITECTURE.partition("## The core, in the order to read it")[2].partition("\n## ")[0]
    return [ROOT / "src" / "hybridflow" / name for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", section)]


def test_core_is_about_6000_lines():
    files = core_files()
    assert len(files) == len(set(files)) > 30
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert 5_500 <= lines <= 6_500
    assert "6,000 lines" in README


def test_loop_in_architecture_is_the_source():
    loop = textwrap.dedent(inspect.getsource(PPO.step))
    shown = re.findall(r"```python source\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert shown == [loop], f"put this into docs/architecture.md:\n{loop}"


def test_loop_in_readme_trains_as_the_source_does(tiny_model, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
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
