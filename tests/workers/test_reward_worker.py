import pytest

from hybridflow.errors import RewardError
from hybridflow.protocol import DataProto
from hybridflow.workers import RewardWorker

ANSWERS = ["<answer> 1 + 2 </answer>", "<answer> 1 - 2 </answer>", "nothing"]


def solutions(*texts, data_source="countdown"):
    count = len(texts)
    return DataProto.from_dict(
        non_tensors={
            "solution_texts": list(texts),
            "data_sources": [data_source] * count,
            "ground_truths": [{"target": 3, "numbers": [1, 2]}] * count,
            "extra_infos": [{"index": i} for i in range(count)],
            "raw_prompts": [[{"role": "user", "content": "make 3"}]] * count,
        }
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_data_source_selects_its_function_on_any_number_of_ranks(group, num_workers):
    scored = group(RewardWorker, num_workers=num_workers).score(solutions(*ANSWERS))
    scores = scored.batch["scores"].tolist()
    assert scores[0] == 1.0 > scores[1] >= scores[2]
    assert scored.batch["reward_failed"].tolist() == [False] * 3


def test_a_user_function_returns_extra_values(group, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str), 'index': extra_info['index'], 'target': ground_truth['target']}\n"
    )
    workers = group(RewardWorker, f"reward.function={file}:score", "reward.processes=0", num_workers=2)
    scored = workers.score(solutions("a", "bc", "def"))
    assert scored.batch["scores"].tolist() == [1.0, 2.0, 3.0]
    assert scored.non_tensor_batch["reward_extras"].tolist() == [{"index": i, "target": 3} for i in range(3)]


def test_an_unknown_data_source_is_a_reward_error(group):
    with pytest.raises(RewardError, match="no built-in reward function serves data_source 'chess'"):
        group(RewardWorker).score(solutions("a", data_source="chess"))
