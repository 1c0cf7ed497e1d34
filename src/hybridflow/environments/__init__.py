"""Episodes: tools, the formats in which models call them, and conversations whose sampled tokens stay as they are."""

from hybridflow.environments.environment import CalledTool, Done, Environment, Episode, Turn
from hybridflow.environments.episode_tokens import EpisodeRow
from hybridflow.environments.episodes import EpisodeStart, play_episodes
from hybridflow.environments.formats import FORMATS, ToolFormat, format_of, parse_plain
from hybridflow.environments.messages import AssistantTurn, ToolCall
from hybridflow.environments.playing import EpisodeLimits, PlayedEpisode, Player
from hybridflow.environments.rendering import ChatRenderer, NextPrompt
from hybridflow.environments.sft_rows import EpisodeEncoder
from hybridflow.environments.template_check import Finding, check_template
from hybridflow.environments.tools import Tool, tool_of, tools_of

__all__ = [
    "FORMATS",
    "AssistantTurn",
    "CalledTool",
    "ChatRenderer",
    "Done",
    "Environment",
    "Episode",
    "EpisodeEncoder",
    "EpisodeLimits",
    "EpisodeRow",
    "EpisodeStart",
    "Finding",
    "NextPrompt",
    "PlayedEpisode",
    "Player",
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
