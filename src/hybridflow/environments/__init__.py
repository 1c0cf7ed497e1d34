"""Episodes: environments, tools, the formats in which models call them, and their tokens.

Public names are imported at their first use, so that a process of environments starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.environments.agents.agent import Agent, AgentSession
    from hybridflow.environments.episodes.answers import Answer
    from hybridflow.environments.episodes.environment import CalledTool, Done, Environment, Episode, Reply, Turn
    from hybridflow.environments.episodes.episode_tokens import EpisodeRow
    from hybridflow.environments.episodes.episodes import EpisodeStart, play_episodes
    from hybridflow.environments.episodes.formats import FORMATS, ToolFormat, format_of, parse_plain
    from hybridflow.environments.episodes.messages import AssistantTurn, ToolCall
    from hybridflow.environments.episodes.playing import EpisodeLimits, PlayedEpisode, Player
    from hybridflow.environments.episodes.rendering import ChatRenderer, NextPrompt
    from hybridflow.environments.episodes.sft_rows import EpisodeEncoder
    from hybridflow.environments.episodes.template_check import Finding, check_template
    from hybridflow.environments.episodes.tools import Tool, tool_of, tools_of
    from hybridflow.environments.processes.client import EpisodeClient, LocalEnvironment
    from hybridflow.environments.processes.environment_kind import EnvironmentKind
    from hybridflow.environments.processes.environment_pool import EnvironmentPool
    from hybridflow.environments.processes.host import EnvironmentHost
    from hybridflow.environments.processes.limited_calls import CallLimits

_NAMES = {
    "agents.agent": ("Agent", "AgentSession"),
    "episodes.answers": ("Answer",),
    "processes.client": ("EpisodeClient", "LocalEnvironment"),
    "episodes.environment": ("CalledTool", "Done", "Environment", "Episode", "Reply", "Turn"),
    "episodes.episode_tokens": ("EpisodeRow",),
    "episodes.episodes": ("EpisodeStart", "play_episodes"),
    "episodes.formats": ("FORMATS", "ToolFormat", "format_of", "parse_plain"),
    "processes.environment_kind": ("EnvironmentKind",),
    "processes.host": ("EnvironmentHost",),
    "processes.limited_calls": ("CallLimits",),
    "episodes.messages": ("AssistantTurn", "ToolCall"),
    "episodes.playing": ("EpisodeLimits", "PlayedEpisode", "Player"),
    "processes.environment_pool": ("EnvironmentPool",),
    "episodes.rendering": ("ChatRenderer", "NextPrompt"),
    "episodes.sft_rows": ("EpisodeEncoder",),
    "episodes.template_check": ("Finding", "check_template"),
    "episodes.tools": ("Tool", "tool_of", "tools_of"),
}
_MODULES = {name: f"hybridflow.environments.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "FORMATS",
    "Agent",
    "AgentSession",
    "Answer",
    "AssistantTurn",
    "CallLimits",
    "CalledTool",
    "ChatRenderer",
    "Done",
    "Environment",
    "EnvironmentHost",
    "EnvironmentKind",
    "EnvironmentPool",
    "Episode",
    "EpisodeClient",
    "EpisodeEncoder",
    "EpisodeLimits",
    "EpisodeRow",
    "EpisodeStart",
    "Finding",
    "LocalEnvironment",
    "NextPrompt",
    "PlayedEpisode",
    "Player",
    "Reply",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "Turn",
    "check_template",
    "format_of",
    "parse_plain",
    "play_episodes",
    "tool_of",
    "tools_of",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'hybridflow.environments' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
