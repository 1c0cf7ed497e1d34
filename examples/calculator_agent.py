"""An agent of the OpenAI Agents SDK, as it is: the library asks the model, and calls the calculator for it."""

from collections.abc import Mapping
from typing import Any

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, BadRequestError

from hybridflow.environments import AgentSession

CLIENT = AsyncOpenAI(base_url="http://set.for.each.episode", api_key="set for each episode")


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def calculator(session: AgentSession, row: Mapping[str, Any]) -> float:
    """Return 1.0 if the last words of the agent are the right answer."""
    model = OpenAIChatCompletionsModel(
        "policy", CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    )
    agent = Agent("calculator", tools=[multiply], model=model)
    try:
        result = await Runner.run(agent, row["prompt"], run_config=RunConfig(tracing_disabled=True))
    except (AgentsException, BadRequestError):  # an unknown tool, or more turns or tokens than the run allows
        return 0.0
    return float(str(result.final_output).strip() == row["ground_truth"])
