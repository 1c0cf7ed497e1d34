"""The agents of a rank: their endpoint, and a player for each episode."""

import asyncio
import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hybridflow.config import Config
from hybridflow.environments import EnvironmentPool, EpisodeLimits
from hybridflow.environments.agents.agent_player import AgentPlayer
from hybridflow.environments.agents.endpoint import Endpoint
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.rollout import SamplingParams


class AgentWorker:
    """Serves the agents of a rank at an endpoint on loopback, as long as its pool of processes is open."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], pool: EnvironmentPool
    ) -> None:
        self._config, self._stop_ids, self._pool = config, stop_ids, pool
        self._renderers = Renderers(tokenizer)
        self._endpoint = Endpoint()
        asyncio.run_coroutine_threadsafe(self._endpoint.start(), pool.loop).result()

    def player(
        self,
        name: str,
        number: int,
        key: tuple[int, ...],
        journal: RewardJournal | None,
        limits: EpisodeLimits,
        sampling: SamplingParams,
    ) -> AgentPlayer:
        """Return the player of an episode of the agent `name`; `number` chooses its process."""
        agent, rollout = self._config.agent, self._config.rollout
        seconds = self._config.environment.max_seconds
        asked = SamplingParams(sampling.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p)

        def session() -> Session:
            tree = TurnTree(self._renderers, self._stop_ids, limits)
            allowed = None if agent.override_sampling else asked
            return Session(tree, allowed, math.inf if seconds is None else seconds)

        return AgentPlayer(
            self._pool.agent(name, number),
            session,
            self._endpoint,
            only_last=agent.train_branches == "last",
            key=key,
            journal=journal,
        )
