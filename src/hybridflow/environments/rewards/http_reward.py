"""Reward from a user's HTTP server."""

import sys
from typing import Any

from hybridflow.environments.rewards.http_client import MAX_SHOWN_CHARS, post_json, without_key
from hybridflow.errors import RewardError


async def http_reward(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    url: str,
    retries: int = 5,
    requests_per_second: float = 0.0,
    request_timeout_s: float = 30.0,
    api_key_env: str = "",
) -> float | dict[str, Any]:
    """POST the sample as JSON to `url` and return the score in the reply.

    The reply is a number, or an object with a "score" and further numbers. A text "answer" in the object is passed on;
    other entries are dropped. `post_json` documents retries and `requests_per_second`. Raises RewardError without such
    a reply.
    """
    sample = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    reply = await post_json(
        url,
        sample,
        retries=retries,
        requests_per_second=requests_per_second,
        request_timeout_s=request_timeout_s,
        api_key_env=api_key_env,
    )
    result = reply if isinstance(reply, dict) else {"score": reply}
    numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
    if "score" not in numbers or not all(abs(number) <= sys.float_info.max for number in numbers.values()):
        raise RewardError(
            f"the scorer replied {without_key(repr(reply), api_key_env)[:MAX_SHOWN_CHARS]}; it must reply with a "
            'finite number, or an object such as {"score": 0.5, "length": 20}.'
        )
    if not isinstance(reply, dict):
        return numbers["score"]
    return numbers | ({"answer": result["answer"]} if isinstance(result.get("answer"), str) else {})
