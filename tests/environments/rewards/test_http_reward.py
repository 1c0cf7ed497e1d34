import asyncio
import json

import pytest

from hybridflow.environments.rewards import http_reward
from hybridflow.errors import RewardError

SAMPLE = {
    "data_source": "sums",
    "solution_str": "It is {4}.",
    "ground_truth": "4",
    "extra_info": {"question": "What is 2 + 2?"},
}


def score(server, **changes):
    return asyncio.run(http_reward(**SAMPLE, url=server.url, **changes))


def test_the_sample_is_posted_and_a_number_is_the_score(server):
    server.answer = lambda request: 0.5
    assert score(server) == 0.5
    assert server.requests[0].json == SAMPLE


def test_an_object_holds_score_further_numbers_and_answer(server):
    for reply, result in (
        ({"score": 1, "length": 10, "right": True}, {"score": 1, "length": 10, "right": True}),
        ({"score": 0.5, "answer": "4", "why": "it is", "steps": [1]}, {"score": 0.5, "answer": "4"}),
        (True, True),
        (-3, -3),
    ):
        server.answer = lambda request, reply=reply: reply
        assert score(server) == result


def test_a_reply_without_a_finite_score_is_an_error_that_shows_it(server):
    replies = ["0.5", [0.5], {}, {"reward": 1.0}, {"score": "1"}, {"score": None}, 10**400, {"score": 1, "n": 10**400}]
    for reply in [*replies, float("inf"), None]:
        body = json.dumps(reply).replace("Infinity", "1e999")
        server.answer = lambda request, body=body: (200, {}, body)
        with pytest.raises(RewardError, match="must reply with a finite number, or an object such as") as error:
            score(server)
        assert f"the scorer replied {repr(reply)[:200]};" in str(error.value)


def test_the_settings_reach_the_client(server, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "sk-123456")
    server.answer = lambda request: (503, {}, "")
    with pytest.raises(
        RewardError, match=r"after 2 attempts.*retries=1, requests_per_second=50.0, request_timeout_s=300"
    ):
        score(server, retries=1, requests_per_second=50.0, request_timeout_s=300, api_key_env="SCORER_KEY")
    server.answer = lambda request: {"echo": request.headers["Authorization"]}
    with pytest.raises(RewardError, match=r"'Bearer \[hidden\]'"):
        score(server, api_key_env="SCORER_KEY")
