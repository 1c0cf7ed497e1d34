import inspect

from hybridflow.algorithms import POLICY_LOSSES, ppo_policy_loss


def test_the_table_names_the_losses():
    assert dict(POLICY_LOSSES) == {"ppo": ppo_policy_loss}


def test_losses_take_keyword_arguments_only():
    for loss in POLICY_LOSSES.values():
        kinds = {parameter.kind for parameter in inspect.signature(loss).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}
