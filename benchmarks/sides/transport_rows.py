"""What is timed, in the words that both libraries share: groups of workers, batches, futures.

A side says how its library is started and what its workers register (see `TransportSide`); everything timed is here.
"""

import gc
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from support.serve import Channel

from sides.transport_batch import CHUNKS, REPEATS, build_columns, checksum, half_of_rows

NUM_WORKERS = 4
OBJECT_STORE_BYTES = 3 * 2**30
CALLS = 200
"""Of a tiny call in one round, in blocks of BLOCK that alternate with as many empty calls."""
BLOCK = 20

Result = dict[str, Any]


class Empty:
    """A plain Ray actor, for the price of a call that does nothing."""

    def empty(self) -> None:
        pass


class TransportSide:
    """Measures one library on its own cluster.

    `first` and `second` are groups of NUM_WORKERS workers that register

        sums(batch)         DP_COMPUTE_PROTO   each part's checksum, one row a part, in column "sums"
        sums_late(batch)    DP_COMPUTE_PROTO   the same of a future, read where the library reads it best
        give_back(batch)    DP_COMPUTE_PROTO   the part itself; its checksum is kept
        same(batch)         DP_COMPUTE_PROTO   the part itself, a single column "x"
        keep(batch)         DP_COMPUTE_PROTO   the part is kept, nothing returned
        kept(batch)         DP_COMPUTE_PROTO, not blocking   the part that was kept
        last_sums()         ONE_TO_ALL         the checksum of `give_back`

    `dump` pickles a batch as the library's transport does; `loader` makes of that a function that unpickles it into
    memory of its own. `get` is `ray.get`, `empties` are as many plain actors as there are workers.
    """

    def __init__(
        self,
        data_proto: Any,
        width: int,
        groups: tuple[Any, Any],
        empties: list[Any],
        get: Callable[[Any], Any],
        dump: Callable[[Any], Any],
        loader: Callable[[Any], Callable[[], Any]],
    ) -> None:
        self.data_proto, self.empties, self.get = data_proto, empties, get
        self.dump, self.loader = dump, loader
        self.first, self.second = groups
        self.batch = data_proto.from_dict(*build_columns(width))
        self.tiny = data_proto.from_dict({"x": torch.arange(NUM_WORKERS).reshape(-1, 1)})
        self.half = half_of_rows()
        self.rows = {
            "send": self.send,
            "send_return": self.send_return,
            "pass_on": self.pass_on,
            "tiny_call": self.tiny_call,
            "pickle": self.pickle,
            "unpickle": self.unpickle,
            "concat": self.concat,
            "repeat": self.repeat,
            "select_idxs": self.select_idxs,
        }
        self.first.keep(self.batch)

    def serve(self, channel: Channel) -> None:
        """A request names a row; the reply has its seconds, and the checksums of what arrived."""
        for request in channel.requests():
            gc.collect()  # what the round before left is not this one's to clear away
            channel.reply(**self.rows[request["row"]]())

    def send(self) -> Result:
        start = time.perf_counter()
        answer = self.first.sums(self.batch)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "parts": answer.batch["sums"].tolist()}

    def send_return(self) -> Result:
        start = time.perf_counter()
        answer = self.first.give_back(self.batch)
        whole = checksum(answer)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "whole": whole, "parts": self.first.last_sums()}

    def pass_on(self) -> Result:
        """The result is made, and stored, when a later call on the same workers has ended."""
        future = self.first.kept(self.data_proto.from_dict({"x": torch.arange(len(self.batch))}))
        self.first.last_sums()
        start = time.perf_counter()
        answer = self.second.sums_late(future)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "parts": answer.batch["sums"].tolist()}

    def tiny_call(self) -> Result:
        """Seconds of one call; `empty_s`: of an empty call on as many plain actors."""
        seconds = empty_s = 0.0
        for _ in range(CALLS // BLOCK):
            start = time.perf_counter()
            for _ in range(BLOCK):
                self.get([actor.empty.remote() for actor in self.empties])
            empty_s += time.perf_counter() - start
            start = time.perf_counter()
            for _ in range(BLOCK):
                answer = self.first.same(self.tiny)
            seconds += time.perf_counter() - start
        if not torch.equal(answer.batch["x"], self.tiny.batch["x"]):
            raise RuntimeError(f"the tiny call returned {answer.batch['x']}.")
        return {"seconds": seconds / CALLS, "empty_s": empty_s / CALLS}

    def pickle(self) -> Result:
        pickled, seconds = timed(lambda: self.dump(self.batch))
        return {"seconds": seconds, "whole": checksum(self.loader(pickled)())}

    def unpickle(self) -> Result:
        load = self.loader(self.dump(self.batch))
        loaded, seconds = timed(load)
        require_private(loaded, load)
        return {"seconds": seconds, "whole": checksum(loaded)}

    def concat(self) -> Result:
        chunks = self.batch.chunk(CHUNKS)
        joined, seconds = timed(lambda: self.data_proto.concat(chunks))
        return {"seconds": seconds, "whole": checksum(joined)}

    def repeat(self) -> Result:
        repeated, seconds = timed(lambda: self.batch.repeat(REPEATS, interleave=True))
        return {"seconds": seconds, "whole": checksum(repeated)}

    def select_idxs(self) -> Result:
        selected, seconds = timed(lambda: self.batch.select_idxs(self.half))
        return {"seconds": seconds, "whole": checksum(selected)}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its seconds."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def require_private(loaded: Any, load: Callable[[], Any]) -> None:
    """RuntimeError unless every loaded tensor can be written without changing what it was loaded from."""
    before = {name: int(tensor[0, 0]) for name, tensor in loaded.batch.items()}
    for tensor in loaded.batch.values():
        tensor[0, 0] += 1
    again = load()
    for name, tensor in loaded.batch.items():
        if not (int(tensor[0, 0]) == before[name] + 1 and int(again.batch[name][0, 0]) == before[name]):
            raise RuntimeError(f"{name} shares memory with what it was loaded from.")
        tensor[0, 0] -= 1


def dump_in_band(batch: Any) -> bytes:
    """Everything in one string of bytes."""
    return pickle.dumps(batch)


def dump_out_of_band(batch: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A short string of bytes, and the columns as buffers beside it, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


def load_in_band(pickled: bytes) -> Callable[[], Any]:
    return lambda: pickle.loads(pickled)


def load_out_of_band(pickled: tuple[bytes, list[pickle.PickleBuffer]]) -> Callable[[], Any]:
    """From copies that cannot be written, as what is mapped from a store cannot: what is loaded has to be copied."""
    stream, buffers = pickled[0], [bytes(buffer.raw()) for buffer in pickled[1]]
    return lambda: pickle.loads(stream, buffers=buffers)
