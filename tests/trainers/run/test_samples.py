import json
import math

import pytest
import torch

from hybridflow.config import Config
from hybridflow.protocol import DataProto
from hybridflow.trainers.run.samples import MAX_GROUND_TRUTH_CHARS, bounded_json, prompt_id, prompt_text, samples_of

FAILED = [False] * 6
SCORES = (0.0, 0.5, 1.0, 0.25, 0.75, 0.1)


def samples(*, count=6, log_tokens=0, lag=0, scores=SCORES, failed=FAILED, timed_out=FAILED, **tensors):
    """Return the samples of two prompts with three responses each, of 1, 2, 3, 3, 3 and 3 tokens."""
    columns = {
        "responses": torch.arange(18).reshape(6, 3),
        "response_mask": torch.arange(3) < torch.tensor([1, 2, 3, 3, 3, 3])[:, None],
        "scores": torch.tensor(scores),
        "group_ids": torch.tensor([0, 0, 0, 1, 1, 1]),
        "reward_failed": torch.tensor(failed),
        "reward_timed_out": torch.tensor(timed_out),
        "advantages": torch.arange(6.0)[:, None],
        "rollout_log_probs": -torch.arange(18).reshape(6, 3) / 3,
        **tensors,
    }
    texts = {
        "raw_prompts": [[{"role": "user", "content": text}] for text in "pppqqq"],
        "prompt_texts": [f"<u>{text}" for text in "pppqqq"],
        "ground_truths": [{"target": 3}] * 3 + ["4"] * 3,
        "solution_texts": list("abcdef"),
        "data_sources": ["math"] * 3 + ["code"] * 3,
        "finish_reasons": ["stop"] * 5 + ["length"],
    }
    trainer = {"log_samples": count, "log_tokens": log_tokens, "lag": lag}
    config = Config().model_copy(update={"trainer": Config().trainer.model_copy(update=trainer)})
    return samples_of(DataProto.from_dict(columns, texts), config, step=7, text_of=lambda token: f"<{token}>")


def test_numbers_of_all_responses_are_one_row():
    numbers = samples(count=0, failed=[True, True, *FAILED[2:]], timed_out=[False, True, *FAILED[2:]])
    p, q = (prompt_id([{"role": "user", "content": text}]) for text in "pq")
    assert numbers.kept == []
    assert numbers.numbers == {
        "step": 7,
        "group": [0, 0, 0, 1, 1, 1],
        "prompt_id": [p, p, p, q, q, q],
        "data_source": ["math"] * 3 + ["code"] * 3,
        "score": pytest.approx(list(SCORES)),
        "length": [1, 2, 3, 3, 3, 3],
        "finish_reason": ["stop"] * 5 + ["length"],
        "failed": ["error", "timeout", "", "", "", ""],
    }


SOME_FAILED = [False, True, False, False, True, True]


@pytest.mark.parametrize(
    ("count", "columns", "rows"),
    [
        (1, {}, [2]),
        (2, {}, [0, 2]),
        (3, {}, [0, 2, 3]),
        (4, {}, [0, 1, 2, 3]),
        (99, {}, [0, 1, 2, 3, 4, 5]),
        (2, {"failed": SOME_FAILED}, [1, 2]),  # failed ones take at most half
        (4, {"failed": SOME_FAILED}, [0, 1, 2, 4]),
        (1, {"scores": (math.nan, *SCORES[1:])}, [2]),
        (2, {"scores": (math.nan,) * 6}, [0, 3]),
    ],
)
def test_failed_best_worst_and_first_responses_are_kept(count, columns, rows):
    assert [sample["row"] for sample in samples(count=count, **columns).kept] == rows


def test_a_sample_has_its_texts_and_its_tokens():
    (sample,) = samples(count=1, log_tokens=5).kept
    assert sample == {
        "step": 7,
        "row": 2,
        "prompt": "p",
        "rendered_prompt": "<u>p",
        "ground_truth": {"target": 3},
        "response": "c",
        "prompt_id": prompt_id([{"role": "user", "content": "p"}]),
        "data_source": "math",
        "score": 1.0,
        "length": 3,
        "finish_reason": "stop",
        "failed": "",
        "tokens": {
            "ids": [6, 7, 8],
            "texts": ["<6>", "<7>", "<8>"],
            "log_probs": [-2.0, -2.333, -2.667],
            "advantages": [2.0],
            "mask": [True],
        },
    }


def test_tokens_of_a_sample_are_bounded_and_those_that_do_not_count_are_kept():
    first, second = (sample["tokens"]["ids"] for sample in samples(count=2, log_tokens=2).kept)
    assert (first, second) == ([0], [6, 7])
    assert "tokens" not in samples(count=1).kept[0]
    mask = torch.tensor([[True, False, True]] * 6)
    sample = samples(count=1, log_tokens=2, response_mask=mask).kept[0]
    assert (sample["length"], sample["tokens"]["ids"]) == (2, [6, 7, 8])
    assert sample["tokens"]["mask"] == [True, False, True]


def test_a_number_of_a_token_that_is_not_finite_is_text():
    log_probs = torch.tensor([[math.nan, -math.inf, -1.0]] * 6)
    sample = samples(count=1, log_tokens=3, rollout_log_probs=log_probs).kept[0]
    assert sample["tokens"]["log_probs"] == ["nan", "-inf", -1.0]


def test_with_a_lag_the_staleness_of_a_response_is_that_of_its_oldest_token():
    versions = torch.tensor([[5, 4, -1], [5, 5, 2], [6, 6, 7], [1, 1, 1], [2, 3, 4], [4, 3, 2]])
    mask = torch.arange(3) < torch.tensor([1, 2, 3, 3, 3, 0])[:, None]
    numbers = samples(lag=1, rollout_versions=versions, response_mask=mask).numbers
    assert numbers["staleness"] == [1, 1, 0, 5, 4, None]  # the update of step 7 begins with version 6


def test_ground_truths_are_bounded_json_and_chats_are_joined():
    long = ["x" * 100] * 100
    assert bounded_json(long) == json.dumps(long)[:MAX_GROUND_TRUTH_CHARS] + "..."
    for value, kept in (({"numbers": [1, 2]}, {"numbers": [1, 2]}), (b"a", "b'a'"), ([math.nan], "[nan]")):
        assert bounded_json(value) == kept
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}]
    assert prompt_text(chat) == "Be brief.\n1 + 1"
