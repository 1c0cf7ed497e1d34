"""Extraction of the answer between <answer> and </answer>."""

_OPEN, _CLOSE = "<answer>", "</answer>"


def last_answer(text: str) -> str | None:
    """Return the stripped content of the last complete <answer>...</answer>, or None, in linear time."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return text[start : text.find(_CLOSE, start)].strip()
