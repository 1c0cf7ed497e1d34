"""The tokens of an episode: rows of context and sampled tokens, as they are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class EpisodeRow:
    """A prompt, then sampled tokens and those of new messages, by turns.

    `is_sampled` is True for the tokens that the model made; `log_probs`, `versions` and `rewards` are 0 for the others.
    `turns`: the number of the turn that a token belongs to; messages after a turn belong to it. `rewards`: the reward
    of a turn, at its last sampled token. `routes`: those of its first tokens, in parts, if the engine records them.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    routes: list["Tensor"] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """All tokens so far: the prompt of the next turn."""
        return [*self.prompt_ids, *self.ids]

    @property
    def num_tokens(self) -> int:
        """The number of all tokens so far."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model made."""
        return sum(self.is_sampled)

    def add_sampled(self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int], turn: int) -> None:
        """Append the tokens of a turn as they were sampled."""
        self._add(ids, True, turn)
        self.log_probs += log_probs
        self.versions += versions

    def add_routes(self, routes: "Tensor | None") -> None:
        """Add the routes of the tokens so far, of which those that are known stay as they are."""
        if routes is not None:
            self.routes.append(routes[sum(map(len, self.routes)) :].clone())  # not a view of all before

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the newest turn, whose last token is the newest one."""
        if self.rewards:
            self.rewards[-1] += reward

    def add_messages(self, ids: Sequence[int], turn: int) -> None:
        """Append the tokens of the messages that answer a turn."""
        self._add(ids, False, turn)
        self.log_probs += [0.0] * len(ids)
        self.versions += [0] * len(ids)

    def _add(self, ids: Sequence[int], is_sampled: bool, turn: int) -> None:
        self.ids += ids
        self.is_sampled += [is_sampled] * len(ids)
        self.turns += [turn] * len(ids)
        self.rewards += [0.0] * len(ids)
