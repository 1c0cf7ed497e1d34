import inspect

from hybridflow.algorithms import ADVANTAGES, gae_advantages, grpo_advantages


def test_the_table_names_the_estimators():
    assert ADVANTAGES["gae"] is gae_advantages
    assert ADVANTAGES["grpo"] is grpo_advantages
    for name, function in ADVANTAGES.items():
        words = {"none": "no"}.get(name, name).replace("++", "_plus_plus").replace("@", "_at_").replace("-", "_")
        assert inspect.unwrap(function).__name__ == f"{words}_advantages"


def test_estimators_take_keyword_arguments_only():
    for estimator in ADVANTAGES.values():
        kinds = {parameter.kind for parameter in inspect.signature(estimator).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_a_signature_names_the_columns_that_are_read():
    assert list(inspect.signature(gae_advantages).parameters)[:3] == ["token_level_rewards", "values", "response_mask"]
    assert list(inspect.signature(grpo_advantages).parameters)[:2] == ["scores", "group_ids"]
