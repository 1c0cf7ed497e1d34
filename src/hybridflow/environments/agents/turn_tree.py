"""The turns of one episode as a tree: a request goes on from the deepest turn whose messages it repeats.

    request 1 ──> turn 1 ──> turn 2 ──> turn 3          row 1: turns 1, 2, 3
                     └─────> turn 4 (a retry)           row 2: turn 4, after the tokens of turn 1
    request 5 (another system prompt) ──> turn 5        row 3: turn 5

Only new messages are rendered; the tokens of turns stay as they were sampled. A row of tokens ends at each leaf, and
each turn is sampled, and trained, in one row.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hybridflow.data.chat_prompts import is_begun
from hybridflow.data.turn_rendering import NextPrompt
from hybridflow.environments.agents.chat import ChatReply, ChatRequest, RefusedError
from hybridflow.environments.episodes.episode_tokens import EpisodeRow
from hybridflow.environments.episodes.formats import parse_plain
from hybridflow.environments.episodes.messages import AssistantTurn, Message
from hybridflow.environments.episodes.playing import EpisodeLimits
from hybridflow.environments.episodes.rendering import ChatRenderer
from hybridflow.errors import HybridFlowError
from hybridflow.rollout import Completion

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MOST_RENDERERS = 64
"""Sets of tools whose renderers are kept."""

_SORTED = json.JSONEncoder(sort_keys=True)


class Renderers:
    """The renderers of a tokenizer, one for each set of tools that requests bring."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._of = lru_cache(MOST_RENDERERS)(lambda tools: ChatRenderer(tokenizer, json.loads(tools)))
        self.text_of = lru_cache(None)(lambda token: str(tokenizer.decode([token])))

    def of(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """Return the renderer of a request. Raises RefusedError if the chat template cannot write such tools."""
        try:
            return self._of(json.dumps(list(tools)))
        except HybridFlowError as error:
            raise RefusedError(400, "tools_not_supported", str(error)) from error


@dataclass(eq=False)
class TreeTurn:
    """A turn: the tokens before it, those that were sampled, and the messages up to its own.

    `noise` is a digest of what was asked and how often, so that the turn's tokens do not depend on the order in which
    requests come.
    """

    request: ChatRequest
    prompt: NextPrompt
    context: list[int]
    parent: "TreeTurn | None"
    most_tokens: int  # of its row
    max_tokens: int
    noise: tuple[int, ...]
    position: int  # the number of its messages
    digest: "hashlib.blake2b"  # of tools and messages before the turn
    path: bytes = b""  # digest of these and of what its client has got, which later requests repeat
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: "Tensor | None" = None  # of its tokens, and of those before it that its parent has none of
    written: Message = field(default_factory=dict)  # as the template is to write it
    reply: ChatReply | None = None
    is_dropped: bool = False  # its client has not got it: its tokens are not trained
    number: int = 0  # among the requests of its episode

    @property
    def turn_id(self) -> str:
        """The name of the turn, the same whenever it is asked again."""
        return "".join(f"{word:x}" for word in self.noise)

    @property
    def starts_row(self) -> bool:
        """Whether its context is the prompt of a row, because nothing before it was sampled, or as it was sampled."""
        return self.parent is None or self.prompt.is_new_row or self.parent.is_dropped

    @property
    def num_routed(self) -> int:
        """The number of its first tokens whose routes the turns before it have: all but the last one of its parent."""
        if self.parent is None or self.prompt.is_new_row or self.parent.routes is None:
            return 0
        return len(self.parent.context) + len(self.parent.ids) - 1

    @property
    def is_kept(self) -> bool:
        """Whether its client has got it."""
        return self.reply is not None and not self.is_dropped


class TurnTree:
    """The turns that an episode's requests have asked for, at most `limits.turns`, in at most `limits.rows` rows."""

    def __init__(self, renderers: Renderers, stop_ids: Sequence[int], limits: EpisodeLimits) -> None:
        self._renderers, self._stop_ids, self.limits = renderers, stop_ids, limits
        self.turns: list[TreeTurn] = []
        self._num_asked: dict[tuple[int, int], int] = {}
        self._least_asked = 0  # of what was forgotten
        self._earlier: dict[tuple[int, ...], TreeTurn] = {}  # by noise, from before a restart

    @property
    def kept(self) -> list[TreeTurn]:
        """The turns that clients have got, in the order of their requests."""
        return [turn for turn in self.turns if turn.is_kept]

    def restart(self) -> None:
        """Forget the requests, but not the tokens: what is asked again has the same turn."""
        self._earlier |= {turn.noise: turn for turn in self.turns if turn.reply}
        self.turns = []
        self._num_asked.clear()

    def ask(self, request: ChatRequest) -> TreeTurn:
        """Return the turn of a request, which has a reply if it is known from before a restart.

        Raises RefusedError for messages that the chat template does not take, and beyond a limit.
        """
        live = [turn for turn in self.turns if not turn.is_dropped]
        if len(live) >= self.limits.turns:
            raise RefusedError(
                400,
                "max_turns",
                f"the episode has had environment.max_turns={self.limits.turns} turns; end it, or raise the limit.",
            )
        turn = self._attached(request)
        if turn.max_tokens < 1:
            has_own = self.limits.tokens < self.limits.context_tokens
            of_them = f", and data.max_response_length={self.limits.tokens} after its first prompt" * has_own
            fix = "raise it or data.max_prompt_length, " * has_own
            raise RefusedError(
                400,
                "context_length_exceeded",
                f"the conversation has {len(turn.context)} tokens, which leaves no room for a turn: a row may have "
                f"{self.limits.context_tokens} tokens{of_them}; {fix}shorten the messages or end the episode.",
            )
        gone_on = {id(each.parent) for each in (*live, turn) if not each.starts_row}
        if sum(id(each) not in gone_on for each in (*live, turn)) > self.limits.rows:
            raise RefusedError(
                400,
                "max_rows",
                f"the request changes earlier messages, which begins another row of the episode, of "
                f"environment.max_rows={self.limits.rows}; go on from the last turn, or raise the limit.",
            )
        self._num_asked[turn.noise[0], turn.noise[1]] = turn.noise[2] + 1
        if earlier := self._earlier.pop(turn.noise, None):
            earlier.parent, earlier.is_dropped = turn.parent, False
            turn = earlier
        self.turns.append(turn)
        return turn

    def tokens_of(self, request: ChatRequest) -> int:
        """Return the number of tokens before the turn of a request."""
        return len(self._attached(request).context)

    def answer(self, turn: TreeTurn, completion: Completion) -> None:
        """Give a turn its tokens and its reply."""
        request, renderer, ids = turn.request, self._renderers.of(turn.request.tools), completion.token_ids
        turn.ids, turn.log_probs, turn.versions = ids, completion.log_probs, completion.versions
        if completion.routes is not None:
            turn.routes = completion.routes[turn.num_routed :].clone()  # not a view of all before
        ends_with_token = bool(ids) and ids[-1] in self._stop_ids
        begun = str(request.messages[-1].get("content") or "") if is_begun(request.messages) else ""
        text = renderer.decode(ids[:-1] if ends_with_token else ids)
        stopped_at = None
        if completion.finish_reason == "stop" and not ends_with_token:
            stopped_at = next(
                (stop for stop in sorted(request.stop, key=len, reverse=True) if text.endswith(stop)), None
            )
        said = renderer.parse(ids, self._stop_ids, turn.prompt.text, begun)
        if not request.may_call or (said.malformed and not said.calls):
            said = AssistantTurn(begun + text) if "<think>" not in text else parse_plain(begun + text)
        turn.written = said.message()
        shown = said.content.removeprefix(begun.strip()) if begun else said.content
        shown = shown.removesuffix(stopped_at) if stopped_at else shown
        turn.reply = ChatReply(
            turn.turn_id,
            AssistantTurn(shown, said.reasoning, said.calls),
            completion.finish_reason != "stop",
            stopped_at,
            turn.context,
            tuple(ids),
            tuple(completion.log_probs),
            self._renderers.text_of,
        )
        repeated, path = turn.reply.said.message(), turn.digest.copy()
        path.update(_canonical({**repeated, "content": begun + str(repeated.get("content") or "")}))
        turn.path = path.digest()

    def forget_oldest(self, most: int) -> None:
        """Forget the oldest turns that are not open, if there are more than `most` and an eighth; `most` stay.

        Requests do not go on from them. Noise is not used again.
        """
        if len(self.turns) <= most + most // 8:
            return
        gone = {turn for turn in self.turns[:-most] if turn.reply or turn.is_dropped}
        self.turns = [turn for turn in self.turns if turn not in gone]
        for turn in gone:
            self._least_asked = max(self._least_asked, self._num_asked.pop((turn.noise[0], turn.noise[1]), 0))

    def _attached(self, request: ChatRequest) -> TreeTurn:
        """Return the turn of a request after the deepest turn whose messages it repeats, one that none goes on from."""
        messages, renderer = list(request.messages), self._renderers.of(request.tools)
        gone_on = {id(turn.parent) for turn in self.turns if not turn.is_dropped}
        by_path = {turn.path: turn for turn in sorted(self.kept, key=lambda turn: id(turn) not in gone_on)}
        digest = hashlib.blake2b(json.dumps(request.tools, sort_keys=True).encode(), digest_size=16)
        parent, position = None, 0
        num_whole = len(messages) - is_begun(messages)
        for number, message in enumerate(messages[:num_whole], start=1):
            digest = digest.copy()
            digest.update(_canonical(message))
            if number < len(messages) and (found := by_path.get(digest.digest())):
                parent, position = found, number
        for turn in _path(parent):
            messages[turn.position] = turn.written
        try:
            if parent is None:
                prompt = renderer.start(messages)
            else:
                ends = bool(parent.ids) and parent.ids[-1] in self._stop_ids
                new = messages[position:]
                prompt = renderer.go_on(parent.prompt, parent.ids, messages[:position], new, ends_with_token=ends)
        except HybridFlowError as error:
            raise RefusedError(400, "invalid_messages", str(error)) from error
        context, most_tokens = prompt.ids, min(self.limits.context_tokens, len(prompt.ids) + self.limits.tokens)
        if parent and not prompt.is_new_row:
            context, most_tokens = [*parent.context, *parent.ids, *prompt.ids], parent.most_tokens
        room = most_tokens - len(context)
        most = room if request.max_tokens is None else min(room, request.max_tokens)
        asked = _words(context, most, request)
        noise = (*asked, self._num_asked.get(asked, self._least_asked))
        return TreeTurn(request, prompt, context, parent, most_tokens, most, noise, num_whole, digest)

    def messages(self) -> tuple[list[Message], int]:
        """Return the conversation of the newest turn, and how many messages are its first prompt."""
        if not self.kept:
            return [], 0
        last = self.kept[-1]
        path = [*_path(last)]
        messages = list(last.request.messages[: last.position])
        for turn in path[:-1]:
            messages[turn.position] = turn.written
        return [*messages, last.written], path[0].position

    def rows(self, *, only_last: bool = False) -> list[EpisodeRow]:
        """Return the rows of the turns that clients have got, or only those with the conversation of the newest turn.

        A turn has its number among all of these turns.
        """
        kept = self.kept
        if not kept:
            return []
        chosen = [turn for turn in _path(kept[-1]) if turn.is_kept] if only_last else kept
        numbers = {id(turn): number for number, turn in enumerate(kept)}
        rows: list[EpisodeRow] = []
        row_at: dict[int, EpisodeRow] = {}  # by the turn that is its last one
        for turn in chosen:  # a parent comes before its children
            number = numbers[id(turn)]
            row = None if turn.starts_row else row_at.pop(id(turn.parent), None)
            if row is None:
                row = EpisodeRow(list(turn.context))
                rows.append(row)
            else:
                row.add_messages(turn.prompt.ids, numbers[id(turn.parent)])
            row.add_sampled(turn.ids, turn.log_probs, turn.versions, number)
            row.routes = _routes(turn)
            row_at[id(turn)] = row
        return rows


def _path(turn: TreeTurn | None) -> Iterator[TreeTurn]:
    """Yield the turns of a conversation, the first one first."""
    path = []
    while turn is not None:
        path.append(turn)
        turn = turn.parent
    yield from reversed(path)


def _routes(turn: TreeTurn | None) -> list["Tensor"]:
    """Return the routes of the tokens up to a turn, in parts; none if they are not recorded."""
    parts = []
    while turn is not None and turn.routes is not None:
        parts.append(turn.routes)
        turn = turn.parent if turn.num_routed else None
    return parts[::-1]


def _canonical(message: Message) -> bytes:
    """Return what two messages that a client repeats have in common: no reasoning, and no ids of calls."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    content = str(message.get("content") or "")
    if message["role"] == "assistant":
        return _SORTED.encode(["assistant", content.strip(), calls]).encode() + b"\n"
    return _SORTED.encode([message["role"], content, message.get("name")]).encode() + b"\n"


def _words(context: Sequence[int], most: int, request: ChatRequest) -> tuple[int, int]:
    """Return a digest of what is asked as two keys of random numbers."""
    asked = json.dumps([most, request.stop, request.temperature, request.top_p, request.top_k, request.may_call])
    found = hashlib.blake2b(array("q", context).tobytes() + asked.encode(), digest_size=14).digest()
    return int.from_bytes(found[:7], "little"), int.from_bytes(found[7:], "little")
