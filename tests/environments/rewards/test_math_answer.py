import threading

import pytest

from hybridflow.environments.rewards import boxed_answer, math_answer, math_reward
from hybridflow.errors import RewardError
from hybridflow.runtime.deadline import DeadlineExceeded, call_within


def score(solution: str, truth: object, **settings: float) -> float:
    settings = {"timeout_s": 100.0} | settings
    return math_reward(
        data_source="math", solution_str=solution, ground_truth=truth, extra_info={"level": 5}, **settings
    )


@pytest.fixture
def late_comparisons(monkeypatch):
    """Return a list that gets the time limit of each comparison that exceeds it."""
    limits = []

    def call(seconds, function, *arguments):
        try:
            return call_within(seconds, function, *arguments)
        except DeadlineExceeded:
            limits.append(seconds)
            raise

    monkeypatch.setattr(math_answer, "call_within", call)
    return limits


EQUAL = [
    # ground truth, answer
    *((r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", r"\dfrac{2}{4}"), (r"\frac{1}{3}", "0.3333333"), ("1/3", "0.333333")),
    *(("0.5", r"\frac{1}{2}"), ("1000", "1{,}000"), ("1000", r"1\,000"), (r"\$18.90", "18.9"), ("10", "10.")),
    *((r"11\text{ days}", "11"), (r"90^\circ", "90"), (r"10\%", "10"), ("x=5", "5"), ("7", r"\color{red}{7}")),
    *((r"\{1,2,3\}", r"\{3,2,1\}"), ("1,-2", "-2, 1"), (r"3 \pm 2", "5, 1"), (r"\text{Evelyn}", "Evelyn")),
    *(("x^2-1", "(x-1)(x+1)"), (r"e^{x^2}", "e^{x^{2}}"), ("5!", "120"), ("2^{2^{2^{2}}}", "2^{2^{2^{2}}}")),
    *(("1e-3", "0.001"), ("1.6e-19", r"1.6\times10^{-19}"), (r"6.626\times10^{-34}", r"6.626\times 10^{-34}")),
    *((r"(-\infty, 2) \cup (3,\infty)", r"(3,\infty)\cup(-\infty,2)"), ("0.001", "1e-3"), ("1500", "+1.5E3")),
    *(("1000, 0.02", "1e3, 2e-2"), (r"A \cup B", r"A\cup B"), (r"$A \cup B$", r"A \cup B."), ("???", "???")),
    *((r"\left(A \cup B, 2\right)", r"(A\cup B, 2)"), ("5km", r"5\text{ km}"), ("2.5", "2 1/2"), ("-2 1/2", "-2.5")),
    *(("-5", "\u22125"), ("\u22125", "-5"), ("5", "5\u00b0"), (True, "true"), (False, "False")),
]
DIFFERENT = [
    *((r"\frac{1}{2}", "0.51"), (r"\frac{1}{3}", "0.33"), ("0.0000005", "0.0000001"), ("(1,2)", "(2,1)")),
    *(("5", answer) for answer in ("4.999", "-5", "5, 6", "", r"\frac{5}{0}", "\x00")),
    *(("[1,2]", "(1,2)"), (r"6.626\times10^{-34}", r"1.6\times 10^{-19}")),
    *(("5", answer) for answer in ("5x", "x5", "10:5", "5:10", "1.5.2", "5e-3", "5!", "12abc5")),
    *((r"A \cup B", r"A \cap B"), (r"A \cup B", "5"), ("5", r"A \cup B"), ("1", "1e3"), ("0.001", "1e3")),
    *(("10.5", "2 1/2"), ("2", "2 1/2"), (True, "false")),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
]


@pytest.mark.parametrize(("table", "expected"), [(EQUAL, 1.0), (DIFFERENT, 0.0)], ids=["equal", "different"])
def test_answers_are_compared_by_value(table, expected):
    for truth, answer in table:
        assert score(rf"So it is $\boxed{{{answer}}}$.", truth) == expected, (truth, answer)


LAST_IS_5 = [
    *(r"\boxed{4}, no: \boxed{5}", r"\boxed{\boxed{5}}", r"\boxed {5}", r"\boxed{5} and then \boxed{4", r"} \boxed{5}"),
    *("The final answer is $5$.", "I found 4 first.\nThe answer is 5", r"\fbox{5}", r"\boxed{4}, no: \fbox { 5 }"),
    *("Answer: 5e0.", "The answer is 0.5e1", "It is $5.0e0$.", "10:30 is wrong.\nThe answer is 5km.", "It is 10/2"),
    *("The answer is **5**.", "The answer is `5`.", 'The answer is "5".', "**Answer: 5**", "For (1, 2) it is 5."),
]
LAST_IS_NOT_5 = [
    *(
        f"The answer is {value}."
        for value in ("5x", "5e3", "5:10", "10:5", "5.1.2", "5!", "5abc", "5-10-20", "x5", "5i", "1,005e3")
    ),
    *("7 of 5x", r"\boxed{5}, no: \fbox{4}", "It is \u22125.", "The pair is (4, 5).", "It is [1, 5]", "It is 5 1/2."),
    *(r"\boxed{5}, no: \boxed{4}", "The answer is $4$.", "", "I cannot say."),
]


def test_the_last_box_counts_else_the_answer_that_math_verify_finds():
    for solution in LAST_IS_5 + LAST_IS_NOT_5:
        assert score(solution, "5") == (solution in LAST_IS_5), solution


def test_ground_truth_may_be_a_number_or_delimited_latex():
    for truth in ("5", 5, 5.0, "$5$", "$$5$$", r"\(5\)", r"\[ 5 \]", r"\boxed{5}", r"$\boxed{5}$"):
        assert [score(answer, truth) for answer in (r"\boxed{5}", r"\boxed{\frac{10}{2}}", r"\boxed{6}")] == [1, 1, 0]
    for truth in ("", " $ $ ", float("nan"), None, ["5"], {"answer": "5"}, r"\frac{" * 60):
        with pytest.raises(RewardError, match="the ground truth must be a number or LaTeX"):
            score(r"\boxed{5}", truth)


HOSTILE = [
    *("9**9**9**9", "9^9^9", "9^{9}^{9}^{9}", "9^{9^{9^9}}", "9^{9^9 x}", r"9^{\frac{9^{99}}{2}}"),
    "((9^{999})^{999})^{999}",
    *("9^{(9)^{99}}", r"x^{\left(9^{99}\right)}", "9^{99999999}", "99999999!", "(9!)!", "9!!!", "1e999999999"),
    *(r"(99 \cdot 99 \cdot 99 \cdot 99)!", r"\binom{99999999}{44444444}", r"\Gamma(99999999)", r"\Gamma((9999)(9999))"),
    *("1" * 250, "(" * 140 + "1" + ")" * 140, "{" * 140 + "1" + "}" * 140, r"\sqrt{" * 40 + "1" + "}" * 40),
    *("1" * 100_000, "+1" * 50_000),
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_scores_zero_without_the_time_limit(answer, late_comparisons):
    assert score(rf"\boxed{{{answer}}}", "5") == 0.0
    assert score(f"The answer is ${answer}$", "5") == 0.0
    assert late_comparisons == []


def test_timeout_interrupts_a_slow_comparison(late_comparisons):
    assert score(r"\boxed{\sum_{n=1}^{9999} \sin(n^n)^n}", "5", timeout_s=0.3) == 0.0
    assert late_comparisons == [0.3]


def test_an_invalid_timeout_is_an_error():
    for timeout_s in (0, -1.0, float("nan"), float("inf"), "5", True):
        with pytest.raises(RewardError, match=r"timeout_s=.* must be more than 0 seconds, and at most 86400"):
            score(r"\boxed{5}", "5", timeout_s=timeout_s)


@pytest.mark.timeout(120)
def test_many_boxes_and_braces_take_linear_time():
    for solution in (r"\boxed{" * 500_000, r"\boxed{" * 250_000 + "}" * 250_000, "{" * 1_500_000, "$" * 1_500_000):
        assert score(solution, "5") == 0.0


def test_math_reward_works_outside_the_main_thread():
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(score(r"\boxed{\frac{4}{8}}", r"\frac{1}{2}")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_a_vote_is_the_content_of_the_last_box():
    assert boxed_answer(r"\boxed{1} or \boxed{ \frac{1}{2} }") == r"\frac{1}{2}"
    assert boxed_answer(r"\boxed{\{1, 2\}}") == r"\{1,2\}"
    assert {boxed_answer(rf"\boxed{{{x}}}") for x in ("0.001", "1e-3", r"\fbox{1/1000}", "$.001$.")} == {"1/1000"}
    assert boxed_answer("none") is None
    assert boxed_answer(r"\boxed{}") is None
    assert boxed_answer(rf"\boxed{{{'1' * 301}}}") is None
