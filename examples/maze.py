"""A text game: find the way through a seeded maze. The player says a direction, and is answered with what it sees."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.environments import Done, Environment, Episode, Reply, Turn

SIZE = 5
WALLS = 4
MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}

Place = tuple[int, int]


class Maze(Environment):
    """An episode ends at the goal, which is worth 1; a move towards it is worth a little, one away costs as much."""

    async def reset(self, row: Mapping[str, Any]) -> Sequence[dict[str, str]]:
        self.walls, self.here, self.goal = draw_maze(int(row["ground_truth"]))
        return [{"role": "user", "content": view(self.walls, self.here, self.goal)}]

    async def step(self, turn: Turn) -> Reply | Done:
        move = MOVES.get(turn.content.strip())
        if move is None:
            return Reply([{"role": "user", "content": "say a direction"}], reward=-0.1)
        before, there = distance(self.here, self.goal), (self.here[0] + move[0], self.here[1] + move[1])
        if there in open_places(self.walls, self.here):
            self.here = there
        nearer = 0.1 * (before - distance(self.here, self.goal))
        if self.here == self.goal:
            return Done(nearer)
        return Reply([{"role": "user", "content": view(self.walls, self.here, self.goal)}], nearer)

    async def reward(self, episode: Episode) -> dict[str, float]:
        reached = float(self.here == self.goal)
        return {"score": reached, "reached": reached, "moves": len(episode.turns)}


def draw_maze(seed: int) -> tuple[set[Place], Place, Place]:
    """Return walls, start and goal, between which there is a way."""
    drawn = random.Random(seed)
    places = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    while True:
        start, goal, *walls = drawn.sample(places, 2 + WALLS)
        if goal in reachable(set(walls), start) and distance(start, goal) > 2:
            return set(walls), start, goal


def open_places(walls: set[Place], here: Place) -> list[Place]:
    """Return the neighbours of a place that are in the maze and have no wall."""
    near = [(here[0] + x, here[1] + y) for x, y in MOVES.values()]
    return [(x, y) for x, y in near if 0 <= x < SIZE and 0 <= y < SIZE and (x, y) not in walls]


def reachable(walls: set[Place], start: Place) -> set[Place]:
    """Return the places to which there is a way."""
    found, ends = {start}, [start]
    while ends:
        new = [place for place in open_places(walls, ends.pop()) if place not in found]
        found.update(new)
        ends += new
    return found


def distance(a: Place, b: Place) -> int:
    """Return the number of moves between two places without walls."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def view(walls: set[Place], here: Place, goal: Place) -> str:
    """Return what the player sees: the open ways that lead nearer to the goal, or all open ways if none does."""
    ways = {name: (here[0] + x, here[1] + y) for name, (x, y) in MOVES.items()}
    open_ways = [name for name, place in ways.items() if place in open_places(walls, here)]
    nearer = [name for name in open_ways if distance(ways[name], goal) < distance(here, goal)]
    return " ".join(["nearer", *nearer] if nearer else ["around", *open_ways])
