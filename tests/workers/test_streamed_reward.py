"""Parts of a batch are scored at the same time, each with its own scores."""

import pytest

from hybridflow.controller import ClassWithInitArgs, WorkerGroup
from hybridflow.protocol import DataProto
from hybridflow.workers import RewardWorker, StreamedRewardWorker

FUNCTION = """
import asyncio, os

async def score(solution_str, ground_truth, **_):
    directory, number = os.path.split(solution_str)
    open(solution_str, "w").close()
    while len(os.listdir(directory)) < ground_truth:
        await asyncio.sleep(0.01)
    return {"score": float(number), "twice": 2 * int(number)}
"""


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    return f"reward.function={tmp_path}/mine.py:score", "reward.timeout_s=none"


@pytest.fixture
def part_of(tmp_path):
    """Return `part_of(numbers, until)`: rows whose scores are the numbers, once `until` rows are being scored."""
    (tmp_path / "calls").mkdir()

    def build(numbers, until=0):
        return DataProto.from_dict(
            non_tensors={
                "solution_texts": [f"{tmp_path}/calls/{number}" for number in numbers],
                "data_sources": ["d"] * len(numbers),
                "ground_truths": [until] * len(numbers),
                "extra_infos": [None] * len(numbers),
                "raw_prompts": ["p"] * len(numbers),
            }
        )

    return build


def finished(workers, begun):
    """Return scores and extra values of a part, waiting for it."""
    scored = workers.finish_score.remote(begun).get()
    return scored.batch["scores"].tolist(), [extra["twice"] for extra in scored.non_tensor_batch["reward_extras"]]


@pytest.mark.own_run("grpo: its rewards are scored in one part")
@pytest.mark.parametrize(
    ("num_workers", "changes"),
    [
        (1, ("reward.processes=0",)),
        pytest.param(2, (), marks=pytest.mark.runs),
        pytest.param(1, (), marks=pytest.mark.exhaustive),
    ],
)
def test_parts_have_their_own_scores_in_any_order(group, settings, part_of, num_workers, changes):
    workers = group(StreamedRewardWorker, *settings, *changes, num_workers=num_workers)
    parts = [part_of(numbers) for numbers in ([1, 2, 3], [4, 5], [6])]
    begun = [workers.begin_score.remote(part) for part in parts]
    assert finished(workers, begun[1]) == ([4.0, 5.0], [8, 10])
    assert finished(workers, begun[2]) == ([6.0], [12])
    assert finished(workers, begun[0]) == ([1.0, 2.0, 3.0], [2, 4, 6])
    whole = group(RewardWorker, *settings, *changes).score(parts[0])
    assert whole.batch["scores"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.ray
@pytest.mark.own_run("ray: its rewards are scored in one part")
@pytest.mark.timeout(240)
def test_parts_are_scored_at_the_same_time_on_ray(configure, ray_backend, settings, part_of):
    from hybridflow.controller.ray import RayResourcePool

    config = configure(*settings, "reward.processes=1")
    workers = WorkerGroup(RayResourcePool([1]), ClassWithInitArgs(StreamedRewardWorker, config=config), ray_backend)
    futures = []
    for numbers in ([1, 2], [3], [4]):  # each waits for the others
        futures.append(workers.finish_score.remote(workers.begin_score.remote(part_of(numbers, until=4))))
    assert [future.get().batch["scores"].tolist() for future in futures] == [[1.0, 2.0], [3.0], [4.0]]
