"""Tests that run in the program's process: no cheat passes, right programs do, a test without a check is an error."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.programs_cheating import UNPROTECTED
from fixtures.programs_judged import DECEIVING, IDLE, RIGHT
from hybridflow.environments.rewards import code_reward
from hybridflow.errors import RewardError

STARTS_PROCESSES = pytest.mark.own_run("grpo: programs of a model run in processes of their own")

SCORES = {f"deceiving: {name}": (program, statements, 0.0) for name, (program, statements) in DECEIVING.items()}
SCORES |= {f"right: {name}": (program, statements, 1.0) for name, (program, statements, _) in RIGHT.items()}
SCORES |= {f"spoiled: {name}": (program.replace(*other), test, 0.0) for name, (program, test, other) in RIGHT.items()}

QUICK = [
    *(f"deceiving: {name}" for name in ("a manager around an assertion", "abs of the interpreter", "an equal object")),
    *(f"{kind}: {name}" for kind in ("right", "spoiled") for name in ("unittest.main", "doctest", "classes", "copies")),
]
"""Names that `make test` runs."""


def score(program: str, statements: str) -> dict[str, float]:
    truth = {"tests": [statements]}
    return code_reward("code", f"```python\n{program}\n```", truth, timeout_s=60.0, total_timeout_s=150.0)


@pytest.fixture(scope="module")
def scores(request) -> dict[str, float]:
    """Return the scores of the names that this session has chosen; the programs run at the same time."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [call.params["name"] for call in calls if call.params.get("name") in SCORES]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda name: score(*SCORES[name][:2])["score"], names)
        return dict(zip(names, results, strict=True))


@STARTS_PROCESSES
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.runs) for name in SCORES]
)
def test_a_program_passes_only_if_it_is_right(scores, name):
    assert scores[name] == SCORES[name][2]


@pytest.mark.runs
@STARTS_PROCESSES
@pytest.mark.parametrize("statements", UNPROTECTED)
def test_what_a_program_can_still_deceive_counts_as_unprotected(statements):
    assert score(*UNPROTECTED[statements]) == {"score": 1.0, "passed": 1.0, "compiled": 1.0, "unprotected": 1.0}


@pytest.mark.runs
@STARTS_PROCESSES
@pytest.mark.parametrize("statements", IDLE)
def test_statements_that_no_program_fails_are_an_error(statements):
    test, advice = IDLE[statements]
    with pytest.raises(RewardError, match=rf"tests\[0\]: a test checks nothing, .*{advice}"):
        score("def f(x): return x * x", test)


def test_the_tables_have_sixty_cheats_and_thirty_right_programs():
    assert len(DECEIVING) >= 60
    assert len(RIGHT) >= 30
    assert all(part in program for program, _, (part, _) in RIGHT.values())
