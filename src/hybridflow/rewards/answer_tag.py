"""Finds what a response put between <answer> and </answer>."""

_OPEN, _CLOSE = "<answer>", "</answer>"


def last_answer(text: str) -> str | None:
    """The stripped content of the last complete <answer>...</answer>, or None; time is linear in the text."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return text[start : text.find(_CLOSE, start)].strip()
