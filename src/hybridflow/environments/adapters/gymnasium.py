"""Environments of gymnasium: "gymnasium:ID", or "gymnasium:ID?key=value" with arguments of `gymnasium.make`."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hybridflow.environments.adapters import arguments_of, first_seed
from hybridflow.environments.adapters.stepping import NUMBER, SteppingEnvironment, WrongActionError, seed_of
from hybridflow.errors import EnvironmentConfigError

_READABLE = (spaces.Text, spaces.Discrete, spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
_MOST_NUMBERS = 1024
_COLOURED = r"(?:\x1b\[[1-9][\d;]*m)+(.*?)(?:\x1b\[0m)+"


def make(rest: str) -> type["_Gymnasium"]:
    """Return the class of an environment; raise EnvironmentConfigError if its spaces cannot be written as texts."""
    name, arguments = arguments_of(rest)
    environment = gymnasium.make(name, **arguments)
    try:
        _require_readable(environment.observation_space)
        members = {"name": name, "arguments": arguments, "about": _about(environment)}
        members["valid"] = _valid(environment.action_space)
    finally:
        environment.close()
    return type(re.sub(r"\W", "_", name), (_Gymnasium,), members)


def rows(rest: str, split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed: with the same seed, an environment begins in the same state."""
    made = make(rest)
    prompt = f"You act in the environment {made.name}. Answer each observation with an action: {made.valid}."
    for number in range(first_seed(split, seed), first_seed(split, seed) + count):
        yield {
            "prompt": [{"role": "user", "content": f"{prompt}{made.about}"}],
            "data_source": made.name,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"seed": number},
        }


class _Gymnasium(SteppingEnvironment):
    """An episode of an environment, from the seed of the row."""

    name: str
    arguments: Mapping[str, Any]
    about: str
    valid: str

    async def _begin(self, row: Mapping[str, Any]) -> str:
        seed = seed_of(row)
        if seed is None:
            raise EnvironmentConfigError(
                f"a row of gymnasium:{self.name} has no seed; add an integer `seed` to its extra_info, or write rows: "
                f"hybridflow prepare environment 'gymnasium:{self.name}'"
            )
        self._environment = gymnasium.make(self.name, **self.arguments)
        observation, _ = self._environment.reset(seed=seed)
        return self._text(observation)

    async def _act(self, text: str) -> tuple[str, float, bool]:
        action = _action_of(text, self._environment.action_space)
        if action is None:
            raise WrongActionError(f"This is not an action. Answer with {self.valid}.")
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return self._text(observation), float(reward), bool(terminated or truncated)

    def _text(self, observation: Any) -> str:
        """Return an observation as text, with the picture if the environment draws one of characters."""
        shown = observation if isinstance(observation, str) else json.dumps(_plain(observation), ensure_ascii=False)
        if self._environment.render_mode != "ansi":
            return shown
        picture = re.sub(_COLOURED, r"[\1]", str(self._environment.render()))  # as the place of the player is
        return f"{shown}\n{picture.strip()}"

    async def close(self) -> None:
        if hasattr(self, "_environment"):
            self._environment.close()


def _about(environment: gymnasium.Env[Any, Any]) -> str:
    """Return what the environment's docstring says of its actions; empty if it says nothing."""
    text = re.sub(r"^ +", "", inspect.getdoc(environment.unwrapped) or "", flags=re.M)
    found = re.search(r"^## Action Space\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return f"\n\n{found[1].strip()}" if found else ""


def _valid(space: spaces.Space[Any]) -> str:
    """Return what an action is, in words. Raises EnvironmentConfigError for a space without texts."""
    if isinstance(space, spaces.Discrete):
        return f"a number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters of {space.characters!r}"
    raise EnvironmentConfigError(f"the actions are {space}, which a text cannot name; expected Discrete or Text.")


def _action_of(text: str, space: spaces.Space[Any]) -> Any:
    """Return the action that a turn names last, None if there is none."""
    if isinstance(space, spaces.Text):
        return text.strip() if space.contains(text.strip()) else None
    found = [int(number) for number in re.findall(NUMBER, text)[-1:]]
    return found[0] if found and space.contains(found[0]) else None


def _require_readable(space: spaces.Space[Any]) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            _require_readable(part)
    elif not isinstance(space, _READABLE) or np.prod(space.shape or 1) > _MOST_NUMBERS:
        raise EnvironmentConfigError(
            f"the observations are {space}, which have no short text; expected Text, Discrete, MultiDiscrete, Box of "
            f"at most {_MOST_NUMBERS} numbers, or Tuple or Dict of these."
        )


def _plain(value: Any) -> Any:
    """Return an observation as values of JSON, real numbers with five digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return float(f"{value:.5g}") if isinstance(value, float) else value
