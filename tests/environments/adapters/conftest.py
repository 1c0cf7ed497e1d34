"""Episodes of environments of other packages, played by a pool as runs do, and runs that train on them."""

import asyncio

import pytest

from hybridflow.cli.main import main
from hybridflow.environments import AssistantTurn, CallLimits, EnvironmentPool, EpisodeClient, ToolCall
from hybridflow.environments.episodes.answers import Begin, Finish, TakeTurn
from hybridflow.runtime.observe import read_jsonl


@pytest.fixture
def play():
    """Return `play(source, row, turns)`: the answers to a row, to turns (texts, or lists of calls) and to their end.

    `judge` is reward.function.
    """
    pools = {}

    def play(source, row, turns, processes=0, judge=""):
        if (source, processes) not in pools:
            settings = {"num_processes": processes, "limits": CallLimits(60.0), "reward_function": judge}
            pools[source, processes] = EnvironmentPool({"it": source}, **settings)
        pool = pools[source, processes]
        said = [
            AssistantTurn(turn) if isinstance(turn, str) else AssistantTurn("", calls=tuple(ToolCall(*c) for c in turn))
            for turn in turns
        ]
        row = {**row, "ground_truth": row.get("reward_model", {}).get("ground_truth", "")}

        async def answers():
            client = EpisodeClient(pool.environment("it", 0))
            return [await client(question) for question in (Begin(row), *map(TakeTurn, said), Finish("done"))]

        return asyncio.run_coroutine_threadsafe(answers(), pool.loop).result(120)

    yield play
    for pool in pools.values():
        pool.close()


@pytest.fixture
def train(tmp_path, restores_the_process):
    """Return `train(source, *settings)`: the metrics of a step in which `model` in the directory has learned."""

    def train(source, *settings):
        rows = ["--train-size=4", "--test-size=2", f"--output-dir={tmp_path}/data"]
        settings = [
            *(f"model.path={tmp_path}/model", f"data.train_files=['{tmp_path}/data/train.parquet']"),
            *("data.train_batch_size=2", "rollout.group_size=4", "trainer.total_steps=1"),
            *("data.max_prompt_length=1500", "data.max_response_length=400", f"trainer.run_dir={tmp_path}/run"),
            *(f'environment.classes={{it = "{source}"}}', *settings),
        ]
        assert main(["prepare", "environment", source, *rows]) == 0
        assert main(["train", *settings]) == 0
        (row,) = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if row["step"] == 1]
        assert row["episode/ended_error"] == row["reward/error_rate"] == 0
        assert row["critic/score/max"] > row["critic/score/min"]
        assert row["actor/grad_norm"] > 0
        return row

    return train
