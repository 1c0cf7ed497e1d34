"""The reward of the task: training calls `reward` for each response."""


def reward(completion: str, answer: str, **_: object) -> dict[str, float]:
    """Return 1 for the right number, and up to 0.5 for a near one: where nothing is rewarded, nothing is learned.

    Parameters are matched by name: `prompt`, `completion`, `answer`, and every other column of the rows. The result is
    a number, or a dict with a `score`, whose other numbers become metrics.
    """
    text = completion.strip()
    if not text.isdecimal():
        return {"score": 0.0, "is_number": 0.0}
    distance = abs(int(text) - int(answer))
    return {"score": 1.0 if distance == 0 else max(0.0, 0.5 - distance / 20), "is_number": 1.0}
