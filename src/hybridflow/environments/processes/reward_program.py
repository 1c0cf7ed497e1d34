"""Program of a reward process: answers (seed, arguments of a sample or a batch) with the result of the function."""

import asyncio
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from hybridflow.environments.processes.arguments import LoadedReward, num_samples_of
from hybridflow.environments.processes.connection import Replies, receive, serve
from hybridflow.runtime.user_code import load_user_function


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[BinaryIO, Replies], None]]:
    """Return how the function is called, and what answers questions. Raises what its file raises."""
    reward, timeout_s = LoadedReward.load(settings, load_user_function), settings["timeout_s"]
    kind = reward.kind

    async def answer_async(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
        del seed  # calls share the random state
        seconds = timeout_s and timeout_s * num_samples_of(arguments)
        return (await reward.call_async(arguments, seconds, f"took longer than reward.timeout_s={timeout_s}"))[0]

    def answer(questions: BinaryIO, replies: Replies) -> None:
        if kind.is_async:
            asyncio.run(serve(answer_async, questions, replies))
            return
        while (question := receive(questions)) is not None:
            number, seed, arguments = question
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
            replies.send({**reward.call(arguments)[0], "number": number})

    return asdict(kind), answer
