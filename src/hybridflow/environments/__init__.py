"""Episodes: tools, the formats in which models call them, and conversations whose sampled tokens stay as they are."""

from hybridflow.environments.formats import FORMATS, ToolFormat, format_of, parse_plain
from hybridflow.environments.messages import AssistantTurn, ToolCall
from hybridflow.environments.rendering import ChatRenderer, NextPrompt
from hybridflow.environments.template_check import Finding, check_template
from hybridflow.environments.tools import Tool, tool_of, tools_of

__all__ = [
    "FORMATS",
    "AssistantTurn",
    "ChatRenderer",
    "Finding",
    "NextPrompt",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "check_template",
    "format_of",
    "parse_plain",
    "tool_of",
    "tools_of",
]
