"""Tokenizers that encode and render in a child process, which is killed if it hangs or takes all memory.

A tokenizer is a program of its model: its patterns may take years for a text, its rules may multiply one, and a chat
template may hang in C, where no alarm interrupts it.
"""

import os
import string
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hybridflow.errors import DataError
from hybridflow.runtime.child_server import ChildServer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_S, CHARS_PER_S = 10.0, 10_000
"""Seconds that a call may take, and characters for which it may take a second more; a good one encodes a million."""

MEMORY_BYTES = 8 << 30
"""Memory that the child may take beyond what this process has."""

CHUNK_CHARS = 100_000
"""Characters of the texts that are encoded in one call, if there are several."""

MOST_CHILDREN = 16

PROBE = string.printable
"""A text with common characters, for what a tokenizer does with any text."""

_DOES = {"__call__": "encode a text", "decode": "decode a few tokens", "apply_chat_template": "apply its chat template"}
HINT = "copy it from the model's original directory"

PARALLELISM = "TOKENIZERS_PARALLELISM"


@contextmanager
def watched(tokenizer: "PreTrainedTokenizerBase") -> Iterator["PreTrainedTokenizerBase"]:
    """Let a child encode texts and apply the chat template of a tokenizer meanwhile.

    A call that takes too long or too much memory raises DataError. The child begins with the first call, and more of
    them for many texts. For processes that hold no weights: a fork shares their memory until it is written.
    """
    kind: Any = type(tokenizer)
    name = f"tokenizer='{tokenizer.name_or_path}'"
    servers: list[ChildServer] = []

    def ask(method: str, limit_s: float, server: ChildServer, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        try:
            return server.call(limit_s, method, arguments, options)
        except TimeoutError as error:
            raise DataError(f"{name} took longer than {limit_s:.3g} s to {_DOES[method]}; {HINT}") from error
        except MemoryError as error:
            raise DataError(f"{name} takes too much memory to {_DOES[method]}, or crashes: {error}; {HINT}") from error

    def idle(count: int = 1) -> list[ChildServer]:
        servers[:] = [server for server in servers if not server.has_ended]
        while len(servers) < count:
            servers.append(_fork(tokenizer, kind))
        return servers[:count]

    def encode(_: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        from transformers import BatchEncoding

        def encoded(chunk: Any) -> dict[str, Any]:
            size = len(chunk) if isinstance(chunk, str) else sum(map(len, chunk))
            limit_s, server = CALL_S + size / CHARS_PER_S, free.pop()
            try:
                return ask("__call__", limit_s, server, (chunk, *arguments), options)
            finally:
                free.append(server)

        is_plain = not arguments and options.keys() <= {"add_special_tokens"}  # so parts give the same tokens
        chunks = list(_chunks(text)) if is_plain else [text]
        free = idle(max(1, min(len(chunks) // 2, len(os.sched_getaffinity(0)), MOST_CHILDREN)))
        if len(chunks) == 1:
            return BatchEncoding(encoded(chunks[0]))
        with ThreadPoolExecutor(len(free)) as pool:
            try:
                parts = list(pool.map(encoded, chunks))
            except BaseException:
                close()
                raise
        return BatchEncoding({key: [each for part in parts for each in part[key]] for key in parts[0]})

    def whole(method: str) -> Any:
        return lambda _, *arguments, **options: ask(method, 1.1 * CALL_S, idle()[0], arguments, options)

    def close() -> None:
        while servers:
            servers.pop().close()

    methods = {"__call__": encode, **{method: whole(method) for method in _DOES if method != "__call__"}}
    tokenizer.__class__ = type(kind.__name__, (kind,), methods)
    try:
        yield tokenizer
    finally:
        tokenizer.__class__ = kind
        close()


def require_sound(tokenizer: "PreTrainedTokenizerBase", *, chat_template: bool = True) -> None:
    """Raise DataError for a tokenizer that hangs, or takes all memory, for a common text or a short conversation.

    It may refuse both. `chat_template=False`: its chat template is not used.
    """

    def encode() -> None:
        tokenizer.decode(cast(list[int], tokenizer(PROBE)["input_ids"]))

    def render() -> None:
        tokenizer.apply_chat_template([{"role": "user", "content": PROBE}], tokenize=False)

    with watched(tokenizer):
        for probe in (encode, render) if chat_template and tokenizer.chat_template else (encode,):
            try:
                probe()
            except DataError:
                raise
            except Exception:  # such as a text without an unknown token
                continue


def _fork(tokenizer: Any, kind: Any) -> ChildServer:
    given = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"  # threads of the library do not live on in a child
    try:
        return ChildServer(partial(_answer, tokenizer, kind), MEMORY_BYTES)
    finally:
        os.environ.pop(PARALLELISM)
        if given is not None:
            os.environ[PARALLELISM] = given


def _answer(tokenizer: Any, kind: Any, method: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    tokenizer.__class__ = kind
    found = getattr(tokenizer, method)(*arguments, **options)
    return dict(found) if method == "__call__" else found


def _chunks(text: Any) -> Iterator[Any]:
    """Yield a text, or the texts of a list in parts of about `CHUNK_CHARS` characters."""
    if not isinstance(text, list | tuple) or not all(isinstance(each, str) for each in text) or not text:
        yield text
        return
    start = size = 0
    for end, each in enumerate(text, start=1):
        size += len(each)
        if size >= CHUNK_CHARS or end == len(text):
            yield list(text[start:end])
            start, size = end, 0
