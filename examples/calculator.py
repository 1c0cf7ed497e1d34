"""A calculator: the model may call `multiply`, and what it says last is compared with the right answer."""

from hybridflow.environments import Environment, Episode


class Calculator(Environment):
    """An environment with one tool; an episode ends with the first turn that calls nothing."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    async def reward(self, episode: Episode) -> float:
        return exact(solution_str=episode.turns[-1].content, ground_truth=episode.row["ground_truth"])


def exact(solution_str: str, ground_truth: str, **sample: object) -> float:
    """Return 1.0 for the right answer and nothing else; the reward of a response without tools."""
    return float(solution_str.strip() == ground_truth)
