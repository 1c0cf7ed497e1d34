"""What environment.classes may name, and the rows of an environment of another package."""

import pytest
import torch
from pyarrow.parquet import read_table
from transformers import Qwen2ForCausalLM

from fixtures.tiny_episodes import write_episode_task
from hybridflow.cli.api.environment_argument import environment_sources
from hybridflow.cli.main import main
from hybridflow.config.environment_sources import SCHEMES
from hybridflow.data import load_tokenizer
from hybridflow.environments import CallLimits, EnvironmentPool
from hybridflow.environments.adapters import arguments_of, load, rows_of
from hybridflow.errors import EnvironmentConfigError

LAKE, LEGS = "gymnasium:FrozenLake-v1?is_slippery=False", "reasoning-gym:leg_counting?max_animals=3"
in_processes = pytest.mark.own_run("episodes: environments of other packages")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gymnasium:Frozen-v1", r"^environment\.classes\.a='gymnasium:Frozen-v1': NameNotFound: .* doesn't exist"),
        ("gymnasium:Pendulum-v1", "the actions are Box.* expected Discrete or Text"),
        ("gymnasium:FrozenLake-v1?x", "'x' is not an argument; write NAME\\?key=value"),
        ("gymnasium:FrozenLake-v1?x=1", "unexpected keyword argument 'x'"),
        ("reasoning-gym:legs", "'legs' is not a task of reasoning-gym; the tasks are ab, acre"),
        ("reasoning-gym:leg_counting?max_animals=0", "AssertionError: max_animals must be >= min_animals"),
    ],
)
def test_a_source_that_a_package_does_not_have_is_an_error(source, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        load(source, "environment.classes.a")


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(SCHEMES, "gymnasium", (SCHEMES["gymnasium"][0], "hybridflow-missing-package"))
    message = f"^environment.classes.a='{LAKE}' needs the package hybridflow-missing-package; install it: pip install"
    with pytest.raises(EnvironmentConfigError, match=message.replace("?", r"\?")):
        load(LAKE, "environment.classes.a")


def test_arguments_are_json_literals_of_python_or_texts():
    assert arguments_of("a:B-v1?n=3&slip=False&slow=true&map=4x4&rows=['SF','FG']&left=null&op=%26") == (
        "a:B-v1",
        {"n": 3, "slip": False, "slow": True, "map": "4x4", "rows": ["SF", "FG"], "left": None, "op": "&"},
    )


def test_a_python_program_names_an_environment_by_its_source():
    assert environment_sources(LAKE) == ({"gymnasium": LAKE}, [])


@pytest.mark.runs
@in_processes
def test_the_version_of_the_package_is_the_source_of_the_journal():
    kinds = []
    for processes in (0, 1):
        pool = EnvironmentPool({"lake": LAKE}, num_processes=processes, limits=CallLimits(30.0))
        kinds.append(pool.kinds["lake"])
        pool.close()
    assert kinds[0] == kinds[1]
    assert kinds[0].source.startswith("gymnasium 1.")


@pytest.mark.parametrize("source", [LAKE, LEGS])
def test_prepare_writes_the_rows_of_an_environment(source, tmp_path, capsys):
    sizes = ["--train-size", "3", "--test-size", "2", "--seed", "5"]
    assert main(["prepare", "environment", source, "--output-dir", str(tmp_path), *sizes]) == 0
    assert "wrote 3 rows to" in capsys.readouterr().out
    train, test = (read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    texts = [str(row) for row in (*train, *test)]
    assert len(train) == 3
    assert len({*texts}) == 5
    assert [row["extra_info"]["index"] for row in test] == [0, 1]
    assert rows_of(source, "train", 3, 5) == rows_of(source, "train", 4, 5)[:3] != rows_of(source, "train", 3, 6)


@pytest.mark.parametrize(
    ("source", "message"), [("mine.py:Mine", "expected an environment of gymnasium"), ("gym:A", "has no rows")]
)
def test_a_source_without_rows_is_an_error(source, message, tmp_path, capsys):
    assert main(["prepare", "environment", source, "--output-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.runs
@in_processes
@pytest.mark.parametrize("source", ["gymnasium:CartPole-v1", "reasoning-gym:prime_factorization"])
def test_a_tiny_model_trains_on_an_environment_of_another_package(source, tmp_path, train):
    write_episode_task(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():  # it says digits, so that some of its turns are actions and answers
        model.lm_head.weight[load_tokenizer(tmp_path / "model").convert_tokens_to_ids(["0", "1"]), 0] = 2.0
    model.save_pretrained(tmp_path / "model")
    files = f"data.val_files=['{tmp_path}/data/test.parquet']"
    assert train(source, files, "environment.max_turns=3")["val/score/mean"] >= 0
