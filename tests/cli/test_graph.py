"""`hybridflow graph` draws the dataflow and the loop of a recipe."""

from pathlib import Path

import pytest

from hybridflow.cli.main import main

RECIPE = str(Path(__file__).parents[2] / "recipes/algorithms/grpo.toml")


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("text", "    weights of step 1: sample batch 2, then train on batch 1"),
        ("mermaid", '["weights of step 1"]'),
        ("dot", '    "weights of step 0" -> "batches 0 to 1" [label="sample"];'),
    ],
)
def test_graph_draws_the_loop_of_a_recipe(capsys, form, line):
    lag = ("trainer.lag=1", "algorithm.rollout_weights=token")
    assert main(["graph", RECIPE, "--format", form, *lag]) == 0
    assert line in capsys.readouterr().out
    assert main(["graph", RECIPE, "--format", form]) == 0
    assert "weights of step" not in capsys.readouterr().out


def test_graph_needs_no_model(capsys):
    assert main(["graph", RECIPE, "model.path=owner/model"]) == 0
    drawn = capsys.readouterr().out
    assert main(["graph", RECIPE]) == 0
    assert capsys.readouterr().out == drawn
