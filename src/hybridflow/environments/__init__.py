"""Episodes: environments, tools, the formats in which models call them, and their tokens.

Public names are imported at their first use, so that a process of environments starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.environments.answers import Answer
    from hybridflow.environments.client import EpisodeClient, LocalPlace
    from hybridflow.environments.environment import CalledTool, Done, Environment, Episode, Reply, Turn
    from hybridflow.environments.episode_tokens import EpisodeRow
    from hybridflow.environments.episodes import EpisodeStart, play_episodes
    from hybridflow.environments.formats import FORMATS, ToolFormat, format_of, parse_plain
    from hybridflow.environments.host import CallLimits, EnvironmentHost
    from hybridflow.environments.kinds import EnvironmentKind
    from hybridflow.environments.messages import AssistantTurn, ToolCall
    from hybridflow.environments.playing import EpisodeLimits, PlayedEpisode, Player
    from hybridflow.environments.processes import EnvironmentPool
    from hybridflow.environments.rendering import ChatRenderer, NextPrompt
    from hybridflow.environments.sft_rows import EpisodeEncoder
    from hybridflow.environments.template_check import Finding, check_template
    from hybridflow.environments.tools import Tool, tool_of, tools_of

_NAMES = {
    "answers": ("Answer",),
    "client": ("EpisodeClient", "LocalPlace"),
    "environment": ("CalledTool", "Done", "Environment", "Episode", "Reply", "Turn"),
    "episode_tokens": ("EpisodeRow",),
    "episodes": ("EpisodeStart", "play_episodes"),
    "formats": ("FORMATS", "ToolFormat", "format_of", "parse_plain"),
    "host": ("CallLimits", "EnvironmentHost"),
    "kinds": ("EnvironmentKind",),
    "messages": ("AssistantTurn", "ToolCall"),
    "playing": ("EpisodeLimits", "PlayedEpisode", "Player"),
    "processes": ("EnvironmentPool",),
    "rendering": ("ChatRenderer", "NextPrompt"),
    "sft_rows": ("EpisodeEncoder",),
    "template_check": ("Finding", "check_template"),
    "tools": ("Tool", "tool_of", "tools_of"),
}
_MODULES = {name: f"hybridflow.environments.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "FORMATS",
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
    "LocalPlace",
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
