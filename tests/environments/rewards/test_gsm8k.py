import pytest

from hybridflow.environments.rewards import gsm8k_flexible_reward, gsm8k_reward
from hybridflow.errors import RewardError


def strict(solution: str, truth: object = "72") -> float:
    return gsm8k_reward(data_source="openai/gsm8k", solution_str=solution, ground_truth=truth, extra_info={})


def flexible(solution: str, truth: object = "72") -> float:
    return gsm8k_flexible_reward(data_source="openai/gsm8k", solution_str=solution, ground_truth=truth, extra_info={})


STRICT = {
    "72": ("48 + 24 = 72\n#### 72", "####72", "#### 72.", "#### 72.0 clips", "#### 1 and no: #### 72"),
    "1450": ("#### $1,450",),
    "1,450": ("#### 1450.00",),
    "-5": ("#### -5", "#### -$5", "#### $-5."),
    "\u22125": ("#### -5", "#### \u22125"),
    "0.5": ("#### .5",),
    7: ("#### +7", "#### 7e0", "#### 0.7E1"),
    "1.5e3": ("#### 1500", "#### 1.5e3", "#### 3000/2", "#### 4500.0/3"),
    "1e-3": ("#### .001", "#### 1/1000.", "#### .5/500"),
    "2.5/5": ("#### 0.5",),
    r"$\boxed{5}$": ("#### 5", "#### 5%", "#### 5 apples", "#### 5, or so", "#### 5 - done\n6", "#### 5 (10/2)"),
}
LONGER = (
    "72x",
    "72:10",
    "72.1.1",
    "72/5",
    "72,5",
    "72-5",
    "72 - 5",
    "72^2",
    "72*2",
    "72e2",
    "72 / 6",
    "0x72",
    "72/0",
    *(
        "72, 5",
        "72 or 73",
        "72 to 80",
        "72 1/2",
        "72\u00d72",
        "72 \u2013 80",
        "72 \u2212 1",
        "72;73",
        "72..80",
        "72 + x",
        "72'000",
    ),
)
WRONG = ("", "72", "the answer is 72", "#### 73", "#### x 72", "72 ####", "#### 72 #### 73", "### 72", "#### 7 2")


def test_strict_reads_the_number_after_the_last_mark():
    for truth, solutions in STRICT.items():
        assert [strict(solution, truth) for solution in solutions] == [1.0] * len(solutions), truth
    assert {solution: strict(solution) for solution in WRONG} == dict.fromkeys(WRONG, 0.0)
    assert {value: strict(f"#### {value}") for value in LONGER} == dict.fromkeys(LONGER, 0.0)


FLEXIBLE = {
    "72": ("so the answer is 72.", "#### 72", "(72)", "**72**"),
    "1450": ("it costs $1,450, in all",),
    "8": ("from 80-8",),
    "-8": ("which is -8", "which is \u22128"),
    "3": ("lists 1,2,3",),
}


def test_flexible_reads_the_last_number_of_the_text():
    for truth, solutions in FLEXIBLE.items():
        assert [flexible(solution, truth) for solution in solutions] == [1.0] * len(solutions), truth
    for solution in (
        "",
        "none",
        "72 or 73",
        "1" * 5000,
        "٧٢",
        "72x",
        "1.72.3",
        "10:72",
        "1/72",
        "2^72",
        "1 and 72e1",
        "v72",
    ):
        assert flexible(solution) == 0.0


def test_ground_truth_must_be_a_number():
    for truth in ("many", None, ""):
        with pytest.raises(RewardError, match="must be a number"):
            strict("#### 72", truth)
