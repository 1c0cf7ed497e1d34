"""Import path kept for programs; the module is `hybridflow.environments.episodes.tools`."""

from hybridflow.environments.episodes.tools import Tool, tool_of, tools_of

__all__ = ["Tool", "tool_of", "tools_of"]
