import json
import shutil

import pytest

from hybridflow.config import leaf_keys, load_config, reference_text, to_toml
from hybridflow.config.run_paths import DIRECTORIES, FILES, FUNCTIONS, TRACKERS, absolute_paths

PATHS = [
    "model.path=models/a",
    'data.train_files=["train.parquet", "/data/more.parquet"]',
    "reward.function=mine.py:score",
    "reward.kwargs={prompt_file = 'judge.txt', url = 'http://x/y'}",
    "algorithm.advantage=mine:advantages",
    "trainer.run_dir=runs/one",
    'trainer.trackers=["own.py:Tracker", "tensorboard"]',
    "environment.classes={A-1 = 'a.py:A', b = 'm:B', c = 'command:c.py', d = 'harbor:t?sandbox=s.py:S&network=true'}",
]


@pytest.fixture
def start(tmp_path):
    """Return the directory of a run that was started in `project` with relative paths."""
    run = tmp_path / "project" / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(load_config(None, PATHS)))
    starts = [{"directory": "/elsewhere"}, {"directory": str(tmp_path / "project")}]
    (run / "run.json").write_text(json.dumps({"starts": starts}))
    return run


def test_paths_are_relative_to_the_directory_of_the_newest_start(start, tmp_path):
    project = tmp_path / "project"
    config = load_config(start / "config.toml", absolute_paths(start / "config.toml"))
    assert config.model.path == f"{project}/models/a"
    assert config.data.train_files == (f"{project}/train.parquet", "/data/more.parquet")
    assert config.reward.function == f"{project}/mine.py:score"
    assert config.reward.kwargs == {"prompt_file": f"{project}/judge.txt", "url": "http://x/y"}
    assert config.trainer.run_dir == str(start)
    assert config.algorithm.advantage == "mine:advantages"
    assert config.trainer.trackers == (f"{project}/own.py:Tracker", "tensorboard")
    assert config.reference.model_path == ""
    assert config.environment.classes == {
        "A-1": f"{project}/a.py:A",
        "b": "m:B",
        "c": "command:c.py",
        "d": f"harbor:{project}/t?sandbox={project}/s.py:S&network=true",
    }


def test_paths_stay_as_they_are_without_a_recorded_directory(start, tmp_path):
    (start / "config.toml").write_text(to_toml(load_config(None, ["model.path=~model", "trainer.run_dir=/run"])))
    assert absolute_paths(start / "config.toml") == [f'model.path="{tmp_path}/project/~model"']  # no such user
    shutil.move(tmp_path / "project", tmp_path / "moved")
    moved = tmp_path / "moved" / "runs" / "one"
    for text in (None, "{", json.dumps({"starts": [{"after_step": 0}]}), json.dumps({"starts": []})):
        if text is not None:
            (moved / "run.json").write_text(text)
        assert absolute_paths(moved / "config.toml") == []
    (moved / "run.json").unlink()
    assert absolute_paths(moved / "config.toml") == []


def test_every_key_that_holds_a_path_is_listed():
    listed = {*DIRECTORIES, *FILES, *FUNCTIONS, TRACKERS}
    assert listed <= leaf_keys().keys()
    section, path_keys, comment = "", set(), ""
    for line in reference_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        comment = comment + line if line.startswith("#") else comment
        if " = " in line and not line.startswith("#"):
            key = f"{section}.{line.partition(' = ')[0]}"
            if key.endswith(("path", "_dir", "_files")) or "path.py:function" in comment:
                path_keys.add(key)
            comment = ""
    assert path_keys == listed
