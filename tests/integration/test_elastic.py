"""A run whose number of ranks and of rollout engines changes when it is resumed, against a run that never changes.

Every prompt is used once, in the same order, and loss and gradients are equal to 1e-9 in float64.
"""

import pytest

from fixtures.tiny_run import metrics_differ
from hybridflow.runtime.observe import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.ray, pytest.mark.own_run("resumed: its ranks change")]

EXACT = ("model.dtype=float64", "data.val_files=[]", "trainer.log_samples=24", "trainer.total_steps=6")
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.25")
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token", "placement.roles.rollout=generate", *ON_RAY)
POOLS = "placement.pools={{learn=[{}],generate=[{}]}}"
LAYOUTS = {
    "ppo": {step: (*ON_RAY, f"controller.num_workers={n}") for step, n in {2: 4, 3: 2, 4: 3, 6: 4}.items()},
    "lag": {step: (POOLS.format(*pools),) for step, pools in {2: (1, 2), 4: (2, 1), 6: (1, 3)}.items()},
}
"""Number of ranks, or of training ranks and rollout engines, by the step at which a part of the run ends."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_whose_ranks_change_has_the_samples_loss_and_gradients(tiny, task, tmp_path, run_in_turn, name):
    changes = {"ppo": tiny.PPO, "lag": (*tiny.GRPO, *LAG, POOLS.format(1, 1))}[name]
    command = ["train", f"{task}/rl.toml", *EXACT, *changes]
    fixed, elastic = tmp_path / "fixed", tmp_path / "elastic"
    parts = (
        [*command, *layout, f"trainer.run_dir={elastic}", "--stop-after", step]
        for step, layout in LAYOUTS[name].items()
    )
    run_in_turn([*command, f"trainer.run_dir={fixed}"], *parts, shares_cluster=True)
    figures = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/lr", "critic/score/mean", "staleness/mean")
    assert metrics_differ(fixed, elastic, *figures, "critic/loss", "critic/grad_norm", "critic/values/mean") == []
    keys = ("step", "prompt", "response", "score")
    samples = [[[row[key] for key in keys] for row in read_jsonl(run / "samples.jsonl")] for run in (fixed, elastic)]
    assert samples[0] == samples[1]
    assert len(samples[0]) == 6 * 24
