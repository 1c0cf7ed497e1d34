import pytest

from hybridflow.cli.loop_drawing import draw_loop, loop_edges, loop_steps


def test_the_loop_with_a_lag_of_two_by_hand():
    assert draw_loop(2) == (
        "loop  (trainer.lag = 2)\n"
        "    weights of step 0: sample batches 0 to 2, then train on batch 0\n"
        "    weights of step 1: sample batch 3, then train on batch 1\n"
        "    weights of step 2: sample batch 4, then train on batch 2\n"
        "    weights of step 3: sample batch 5, then train on batch 3\n"
    )
    added = draw_loop(2, on_new_weights="retract").removeprefix(draw_loop(2))
    assert added == '    rollout.on_new_weights = "retract": batches that run go on with the weights of later steps\n'
    assert draw_loop(0) == ""


def test_edges_lead_from_weights_to_batches_to_the_next_weights():
    assert loop_edges(1) == [
        ("weights of step 0", "batches 0 to 1", "sample"),
        ("batches 0 to 1", "weights of step 1", "train on batch 0"),
        ("weights of step 1", "batch 2", "sample"),
        ("batches 0 to 1", "weights of step 2", "train on batch 1"),
        ("weights of step 2", "batch 3", "sample"),
        ("batch 2", "weights of step 3", "train on batch 2"),
    ]
    assert loop_edges(0) == []


@pytest.mark.parametrize("lag", [1, 3, 100])
def test_each_batch_of_the_drawing_is_sampled_lag_steps_early(lag):
    steps = loop_steps(lag)
    sampled_in = {batch: step for step, sampled, _ in steps for batch in sampled}
    assert sampled_in == {batch: max(0, batch - lag) for batch in range(steps[-1].step + lag + 1)}
    assert [trained for _, _, trained in steps] == list(range(min(lag + 2, 5)))
