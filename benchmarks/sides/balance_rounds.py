"""The loop of both sides of `benchmarks/balance.py`: a request has costs, the reply a partition and its time."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from support.serve import Channel

Partition = Callable[[list[int], int, bool], list[list[int]]]


def serve(partition: Partition, **versions: str) -> None:
    """Answer requests (costs, parts, equal, repeats) with the partition and the median of its seconds."""
    channel = Channel()
    channel.ready(channel.options["threads"], **versions)
    for request in channel.requests():
        arguments: Any = (request["costs"], request["parts"], request["equal"])
        result, seconds = partition(*arguments), []
        for _ in range(request["repeats"]):
            start = time.perf_counter()
            result = partition(*arguments)
            seconds.append(time.perf_counter() - start)
        channel.reply(seconds=median(seconds), partition=[list(map(int, part)) for part in result])
