import inspect

from hybridflow.algorithms import POLICY_LOSSES, ppo_policy_loss


def test_the_table_names_the_losses():
    assert POLICY_LOSSES["ppo"] is ppo_policy_loss
    for name, function in POLICY_LOSSES.items():
        assert inspect.unwrap(function).__name__ == f"{name.replace('-', '_')}_policy_loss"


def test_losses_take_keyword_arguments_only():
    for loss in POLICY_LOSSES.values():
        kinds = {parameter.kind for parameter in inspect.signature(loss).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}
