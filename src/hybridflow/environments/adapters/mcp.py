"""`mcp:COMMAND`: the tools of an MCP server, which each episode starts for itself (transport: stdio).

Names, descriptions and schemas are those of the server, which also checks arguments. reward.function scores episodes.
"""

import asyncio
import os
import shlex
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from anyio import BrokenResourceError, ClosedResourceError
from mcp import ClientSession, McpError, StdioServerParameters, stdio_client, types

from hybridflow.environments.episodes.environment import Environment, Turn
from hybridflow.errors import EnvironmentConfigError, ToolError

START_S = 60.0  # in which the server must name its tools


class ServerEndedError(RuntimeError):
    """A server ended, or closed the connection, before its episode ended."""


class McpEnvironment(Environment):
    """The tools of a server, whose process begins with the first call of an episode and ends with it."""

    command: ClassVar[str]
    _server: "_Server | None" = None

    async def step(self, turn: Turn) -> list[Any]:
        """Go on while there are calls. Raises ServerEndedError."""
        if self._server and self._server.problem:
            raise ServerEndedError(self._server.problem)
        return []

    async def close(self) -> None:
        """End the server."""
        if self._server:
            await self._server.close()

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        self._server = self._server or _Server(self.command)
        result = await self._server.ask(partial(ClientSession.call_tool, name=name, arguments=arguments))
        text = "\n".join(map(_text_of, result.content))
        if not result.isError:
            return text
        raise ToolError(text)


class _Server:
    """A server and the session with it, which a task of its own holds, as the client needs it."""

    def __init__(self, command: str) -> None:
        self._command, self.problem = command, ""
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed by `close`)
        self._session = asyncio.Future[ClientSession]()
        self._running = asyncio.create_task(self._run())

    async def ask(self, question: Callable[[ClientSession], Awaitable[Any]]) -> Any:
        """Return the answer to a question. Raises McpError, or ServerEndedError."""

        async def ask() -> Any:
            return await question(await asyncio.shield(self._session))

        asking = asyncio.create_task(ask())
        try:
            await asyncio.wait({asking, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        except Exception as error:
            if not _is_closed(error):
                raise
        finally:
            asking.cancel()
        self._log.seek(0)
        why, printed = self.problem or "it closed the connection", " ".join(self._log.read().split())[-200:]
        self.problem = f"the server {self._command!r} has failed: {why}. {printed}".strip()
        raise ServerEndedError(self.problem)

    async def close(self) -> None:
        """End the process of the server; kill it if it does not end by itself."""
        self._running.cancel()
        await asyncio.wait({self._running})
        self._log.close()

    async def _run(self) -> None:
        program, *arguments = shlex.split(self._command)
        server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        try:
            async with stdio_client(server, self._log) as streams, ClientSession(*streams) as session:
                await session.initialize()
                self._session.set_result(session)
                await asyncio.Event().wait()  # until `close`
        except Exception as error:  # of the server, the system or the client
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            self.problem = self.problem or ("" if _is_closed(error) else f"{type(error).__name__}: {error}")


def make(rest: str) -> type[Environment]:
    """Return an environment with the tools of the server that a command starts."""
    if not shlex.split(rest):
        raise EnvironmentConfigError("the command is empty; write mcp:COMMAND.")
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop
        tools = thread.submit(asyncio.run, _tools_of(rest)).result()
    if not tools:
        raise EnvironmentConfigError("the server has no tools; name the command of another one.")
    methods = {f"tool_{number}": _method(tool) for number, tool in enumerate(tools)}
    return type("McpEnvironment", (McpEnvironment,), {"command": rest, **methods})


async def _tools_of(command: str) -> list[types.Tool]:
    server, tools, cursor = _Server(command), list[types.Tool](), None
    try:
        async with asyncio.timeout(START_S):
            while True:
                params = types.PaginatedRequestParams(cursor=cursor)
                page = await server.ask(partial(ClientSession.list_tools, params=params))
                tools += page.tools
                if not (cursor := page.nextCursor):
                    return tools
    except TimeoutError as error:
        raise EnvironmentConfigError(f"the server did not name its tools in {START_S:g} s; try its command.") from error
    finally:
        await server.close()


def _method(tool: types.Tool) -> Callable[..., Any]:
    async def call(self: McpEnvironment, /, **arguments: Any) -> str:
        return await self._call(tool.name, arguments)

    call.__name__, call.__doc__ = tool.name, tool.description
    call.json_schema = tool.inputSchema  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _is_closed(error: Exception) -> bool:
    is_its = isinstance(error, McpError) and error.error.code == types.CONNECTION_CLOSED
    return is_its or isinstance(error, BrokenResourceError | ClosedResourceError)


def _text_of(content: types.ContentBlock) -> str:
    if isinstance(content, types.EmbeddedResource) and isinstance(content.resource, types.TextResourceContents):
        return content.resource.text
    return content.text if isinstance(content, types.TextContent) else f"[{content.type}: not a text]"
