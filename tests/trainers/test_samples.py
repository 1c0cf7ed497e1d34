import json
import math

import pytest
import torch

from hybridflow.config import Config
from hybridflow.protocol import DataProto
from hybridflow.trainers.samples import MAX_GROUND_TRUTH_CHARS, bounded_json, prompt_id, prompt_text, samples_of

FAILED = [False] * 6


def batch(scores=(0.0, 0.5, 1.0, 0.25, 0.75, 0.1), failed=FAILED, timed_out=FAILED, **tensors):
    """Return two prompts with three responses each, of 1, 2, 3, 3, 3 and 3 tokens."""
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
    return DataProto.from_dict(columns, texts)


def samples(*, count=6, log_tokens=0, lag=0, **columns):
    trainer = {"log_samples": count, "log_tokens": log_tokens, "lag": lag}
    config = Config().model_copy(update={"trainer": Config().trainer.model_copy(update=trainer)})
    return samples_of(batch(**columns), config, step=7, text_of=lambda token: f"<{token}>")


def rows_of(**settings):
    return [sample["row"] for sample in samples(**settings).kept]


def test_numbers_of_all_responses_are_one_row():
    numbers = samples(count=0, failed=[True, True, *FAILED[2:]], timed_out=[False, True, *FAILED[2:]])
    p, q = (prompt_id([{"role": "user", "content": text}]) for text in "pq")
    assert numbers.kept == []
    assert numbers.numbers == {
        "step": 7,
        "group": [0, 0, 0, 1, 1, 1],
        "prompt_id": [p, p, p, q, q, q],
        "data_source": ["math"] * 3 + ["code"] * 3,
        "score": pytest.approx([0.0, 0.5, 1.0, 0.25, 0.75, 0.1]),
        "length": [1, 2, 3, 3, 3, 3],
        "finish_reason": ["stop"] * 5 + ["length"],
        "failed": ["error", "timeout", "", "", "", ""],
    }


def test_best_worst_and_first_responses_are_kept():
    assert rows_of(count=1) == [2]
    assert rows_of(count=2) == [0, 2]
    assert rows_of(count=3) == [0, 2, 3]
    assert rows_of(count=4) == [0, 1, 2, 3]
    assert rows_of(count=99) == [0, 1, 2, 3, 4, 5]


def test_failed_rewards_come_first_and_take_at_most_half():
    failed = [False, True, False, False, True, True]
    assert rows_of(count=2, failed=failed) == [1, 2]
    assert rows_of(count=4, failed=failed) == [0, 1, 2, 4]


def test_a_score_that_is_not_a_number_is_neither_best_nor_worst():
    assert rows_of(count=1, scores=(math.nan, 0.5, 1.0, 0.25, 0.75, 0.1)) == [2]
    assert rows_of(count=2, scores=(math.nan,) * 6) == [0, 3]


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


def test_tokens_of_a_sample_are_bounded():
    first, second = (samples(count=2, log_tokens=2).kept[i]["tokens"] for i in (0, 1))
    assert (first["ids"], second["ids"]) == ([0], [6, 7])
    assert "tokens" not in samples(count=1).kept[0]


def test_tokens_that_do_not_count_are_kept_with_the_mask():
    mask = torch.tensor([[True, False, True]] * 6)
    sample = samples(count=1, log_tokens=2, response_mask=mask).kept[0]
    assert (sample["length"], sample["tokens"]["ids"]) == (2, [6, 7, 8])
    assert sample["tokens"]["mask"] == [True, False, True]


def test_a_number_of_a_token_that_is_not_finite_is_text():
    log_probs = torch.tensor([[math.nan, -math.inf, -1.0]] * 6)
    sample = samples(count=1, log_tokens=3, rollout_log_probs=log_probs).kept[0]
    assert sample["tokens"]["log_probs"] == ["nan", "-inf", -1.0]


def test_with_a_lag_the_staleness_of_each_response_is_that_of_its_oldest_token():
    versions = torch.tensor([[5, 4, -1], [5, 5, 2], [6, 6, 7], [1, 1, 1], [2, 3, 4], [4, 3, 2]])
    mask = torch.arange(3) < torch.tensor([1, 2, 3, 3, 3, 0])[:, None]
    numbers = samples(lag=1, rollout_versions=versions, response_mask=mask).numbers
    assert numbers["staleness"] == [1, 1, 0, 5, 4, None]  # the update of step 7 begins with version 6


def test_ground_truth_of_a_sample_is_bounded_json():
    long = ["x" * 100] * 100
    assert bounded_json(long) == json.dumps(long)[:MAX_GROUND_TRUTH_CHARS] + "..."
    assert bounded_json({"target": 3, "numbers": [1, 2]}) == {"target": 3, "numbers": [1, 2]}
    assert bounded_json(b"a") == "b'a'"
    assert bounded_json([math.nan]) == "[nan]"


def test_chat_messages_are_joined_to_one_text():
    assert prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}]) == (
        "Be brief.\n1 + 1"
    )
