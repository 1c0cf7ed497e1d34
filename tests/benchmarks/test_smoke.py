"""Every benchmark as a real process with `--smoke`: it runs to its end, and its last line has the one format."""

import json
import math
import os
import random
import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))
BARE_MACHINE = str(Path(__file__).parents[1] / "fixtures/bare_machine")
ON_RAY = {"chaos", "overlap", "recovery", "soak", "transport", "uneven", "weight_sync"}
QUICK = ("balance", "report", "rewards", "rollout", "snapshot_size", "trace_share")
"""Benchmarks whose smoke run takes less than 20 seconds; three of them are in a sample."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Mark all benchmarks as exhaustive but for the sample of `--sample`."""
    seed = metafunc.config.option.sample
    drawn = QUICK if seed == "all" else random.Random(seed).sample(QUICK, 3)
    groups = metafunc.config.pluginmanager.hasplugin("xdist")
    if "name" in metafunc.fixturenames:
        cases = [
            pytest.param(
                name,
                marks=[
                    *[pytest.mark.xdist_group(f"smoke_{name}")] * groups,  # any process of the tests may run it
                    *[pytest.mark.ray] * (name in ON_RAY),
                    *[pytest.mark.exhaustive] * (name not in drawn),
                ],
            )
            for name in SCRIPTS
        ]
        metafunc.parametrize("name", cases)


def is_figure(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@pytest.mark.runs
@pytest.mark.own_run("grpo: it is a benchmark")
def test_a_smoke_run_ends_with_one_json_object(command, tmp_path, name):
    absent = [BARE_MACHINE] * (name == "gpu")  # which must run without Ray, vLLM and TRL
    paths = os.pathsep.join([*absent, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command(name, "--smoke"), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if name == "gpu":  # a figure is there as soon as it is measured
        assert "mfu of 0.5B, " in done.stderr
        assert "generation of 0.5B: " in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == ["benchmark", "commit", "smoke", "rows"]
    assert (result["benchmark"], result["smoke"]) == (name, True)
    assert result["commit"]
    assert result["rows"]
    for row in result["rows"]:
        assert list(row) == ["name", "unit", "ours", "peer", "limit", "ratio"]
        assert isinstance(row["name"], str)
        assert isinstance(row["unit"], str)
        assert is_figure(row["ours"]), row
        assert all(row[key] is None or is_figure(row[key]) for key in ("peer", "limit", "ratio")), row
    names = [row["name"] for row in result["rows"]]
    assert len(set(names)) == len(names)
    assert list(tmp_path.iterdir()) == []
