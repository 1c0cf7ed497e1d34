"""The timed operations, in the terms that both libraries share: worker groups, batches, futures.

A side starts its library and defines its workers (see `TransportSide`); everything that is timed is in this file.
"""

import gc
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from support.serve import Channel

from sides.transport_batch import CHUNKS, REPEATS, build_columns, checksum, half_of_rows

OBJECT_STORE_BYTES = 3 * 2**30
BLOCK = 20
"""Tiny calls in a row, which alternate with as many empty calls."""

Result = dict[str, Any]


class Empty:
    """A plain Ray actor, to measure a call that does nothing."""

    def empty(self) -> None:
        pass


class TransportSide:
    """Measures one library on its own cluster.

    `first` and `second` are groups of workers that register

        sums(batch)         DP_COMPUTE_PROTO   return each part's checksum, one row per part, in column "sums"
        sums_late(batch)    DP_COMPUTE_PROTO   the same for a future, read where the library reads it fastest
        give_back(batch)    DP_COMPUTE_PROTO   return the part and keep its checksum
        same(batch)         DP_COMPUTE_PROTO   return the part, a single column "x"
        keep(batch)         DP_COMPUTE_PROTO   keep the part and return nothing
        kept(batch)         DP_COMPUTE_PROTO, not blocking   return the kept part
        last_sums()         ONE_TO_ALL         return the checksum of `give_back`

    `dump` pickles a batch as the library's transport does; `loader` takes the result and returns a function that
    unpickles it into private memory. `get` is `ray.get`, `empties` are as many plain actors as a group has workers.
    `calls`: tiny calls in one round.
    """

    def __init__(
        self,
        data_proto: Any,
        options: dict[str, Any],
        groups: tuple[Any, Any],
        empties: list[Any],
        get: Callable[[Any], Any],
        dump: Callable[[Any], Any],
        loader: Callable[[Any], Callable[[], Any]],
    ) -> None:
        self.data_proto, self.empties, self.get, self.calls = data_proto, empties, get, options["calls"]
        self.dump, self.loader = dump, loader
        self.first, self.second = groups
        self.batch = data_proto.from_dict(*build_columns(options["width"]))
        self.tiny = data_proto.from_dict({"x": torch.arange(options["workers"]).reshape(-1, 1)})
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
        """Answer each request, the name of a row, with its seconds and the checksums of the received batches."""
        for request in channel.requests():
            gc.collect()  # so that garbage of the previous round is not collected in this one
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
        """Time a call on an unread result. It is computed and stored once a later call on the same workers returns."""
        future = self.first.kept(self.data_proto.from_dict({"x": torch.arange(len(self.batch))}))
        self.first.last_sums()
        start = time.perf_counter()
        answer = self.second.sums_late(future)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "parts": answer.batch["sums"].tolist()}

    def tiny_call(self) -> Result:
        """Return the seconds of one call, and in `empty_s` those of an empty call on as many plain actors."""
        seconds = empty_s = 0.0
        for _ in range(self.calls // BLOCK):
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
        return {"seconds": seconds / self.calls, "empty_s": empty_s / self.calls}

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
    """Return the result of a call and its seconds."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def require_private(loaded: Any, load: Callable[[], Any]) -> None:
    """Raise RuntimeError unless every loaded tensor can be written without changing its source."""
    before = {name: int(tensor[0, 0]) for name, tensor in loaded.batch.items()}
    for tensor in loaded.batch.values():
        tensor[0, 0] += 1
    again = load()
    for name, tensor in loaded.batch.items():
        if not (int(tensor[0, 0]) == before[name] + 1 and int(again.batch[name][0, 0]) == before[name]):
            raise RuntimeError(f"{name} shares memory with its source.")
        tensor[0, 0] -= 1


def dump_in_band(batch: Any) -> bytes:
    """Pickle everything into one byte string."""
    return pickle.dumps(batch)


def dump_out_of_band(batch: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle into a short byte string; the columns are separate buffers, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


def load_in_band(pickled: bytes) -> Callable[[], Any]:
    """Return a function that unpickles the result of `dump_in_band`."""
    return lambda: pickle.loads(pickled)


def load_out_of_band(pickled: tuple[bytes, list[pickle.PickleBuffer]]) -> Callable[[], Any]:
    """Return a function that unpickles from read-only copies, as mapped from a store; loading must copy them."""
    stream, buffers = pickled[0], [bytes(buffer.raw()) for buffer in pickled[1]]
    return lambda: pickle.loads(stream, buffers=buffers)
