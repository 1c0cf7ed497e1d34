"""A counter of the work that this process has done, from which an observer tells a slow call from one that hangs."""

_num_done = 0


def note_progress() -> None:
    """Count a piece of work: a micro-batch, a decoding step, a scored response, a written file, a bucket of weights."""
    global _num_done
    _num_done += 1  # where two threads count at once, one increment may be lost; the number still changes


def progress() -> int:
    """Return the number of pieces of work so far."""
    return _num_done
