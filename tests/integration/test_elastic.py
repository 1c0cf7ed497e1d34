"""A run whose number of ranks and of rollout engines changes when it is resumed, against a run that never changes.

Every prompt is used once, in the same order, and loss and gradients are equal to 1e-9 in float64.
"""

from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXACT = ("model.dtype=float64", "data.val_files=[]", "trainer.log_samples=24", "trainer.total_steps=6")
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.25")
NUM_STEPS, NUM_ROWS = 6, 24
"""Two epochs of 24 prompts, with three responses to each of 8 prompts in a step."""

RANKS = {2: 4, 3: 2, 4: 3, 6: 4}
"""Number of ranks by the step at which a part of the run ends."""

ENGINES = {2: (1, 2), 4: (2, 1), 6: (1, 3)}
"""Numbers of training ranks and of rollout engines."""


@pytest.fixture(scope="module")
def runs(tiny, task, tmp_path_factory, run_in_turn):
    """Return float64 runs: `ppo` and `lag`, and `elastic_ppo` and `elastic_lag` whose ranks change."""
    directory = tmp_path_factory.mktemp("elastic")
    ppo = ["train", f"{task}/rl.toml", *tiny.PPO, *EXACT]
    lag = [
        *tiny.commands(task)["grpo"],
        *EXACT,
        *ON_RAY,
        "trainer.lag=1",
        "algorithm.rollout_weights=token",
        "placement.roles.rollout=generate",
    ]
    where = [f"trainer.run_dir={directory}/elastic_ppo"]
    pools = "placement.pools={{learn=[{}],generate=[{}]}}"
    run_in_turn(
        [*ppo, f"trainer.run_dir={directory}/ppo"],
        *(
            [*ppo, *ON_RAY, *where, "--stop-after", str(step), f"controller.num_workers={ranks}"]
            for step, ranks in RANKS.items()
        ),
        [*lag, f"trainer.run_dir={directory}/lag", pools.format(1, 1)],
        *(
            [*lag, f"trainer.run_dir={directory}/elastic_lag", pools.format(*layout), "--stop-after", str(step)]
            for step, layout in ENGINES.items()
        ),
        shares_cluster=True,
    )
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


def read_both(runs, name, file):
    return [read_jsonl(getattr(runs, run) / file) for run in (name, f"elastic_{name}")]


def pairs_of(runs, name):
    fixed, elastic = read_both(runs, name, "metrics.jsonl")
    assert [row["step"] for row in elastic] == [row["step"] for row in fixed] == list(range(1, NUM_STEPS + 1))
    return zip(fixed, elastic, strict=True)


@pytest.mark.parametrize("name", ["ppo", "lag"])
def test_every_prompt_is_used_once_in_the_same_order(runs, name):
    fixed, elastic = read_both(runs, name, "samples.jsonl")
    assert len(fixed) == NUM_STEPS * NUM_ROWS
    epochs = [{row["prompt"] for row in elastic if (row["step"] > NUM_STEPS // 2) == is_second} for is_second in (0, 1)]
    assert epochs[0] == epochs[1]
    for one, other in zip(fixed, elastic, strict=True):
        for key in ("step", "prompt", "response", "score"):
            assert one[key] == other[key]


@pytest.mark.parametrize("name", ["ppo", "lag"])
def test_loss_and_gradient_are_those_of_the_fixed_run(runs, name):
    figures = ["actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "actor/lr"]
    figures += ["critic/loss", "critic/grad_norm", "critic/values/mean"] if name == "ppo" else []
    compared = 0
    for before, after in pairs_of(runs, name):
        for figure in before.keys() & set(figures):
            assert after[figure] == pytest.approx(before[figure], rel=1e-9, abs=1e-12), (before["step"], figure)
            compared += 1
    assert compared > 20


def test_a_batch_that_was_begun_by_other_engines_keeps_its_version(runs):
    for before, after in pairs_of(runs, "lag"):
        assert after["staleness/mean"] == before["staleness/mean"]
