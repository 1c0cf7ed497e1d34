"""The turn to use an engine, between generation and calls beside it."""

import threading

from hybridflow.workers.turn import Turn

LONG_S = 60


def test_a_call_gets_the_turn_between_two_steps_and_generation_goes_on_after_it():
    turn, events, may_step = Turn(), [], threading.Event()

    def call():
        turn.ask()
        events.append("call")
        turn.give_back()

    calls = [threading.Thread(target=call) for _ in range(3)]

    def generate():
        with turn.generating():
            may_step.wait(LONG_S)
            for step in range(3):
                events.append(step)
                turn.hand_over()

    loop = threading.Thread(target=generate)
    loop.start()
    for thread in calls:
        thread.start()
    while turn._num_asking < 3:
        threading.Event().wait(0.001)
    assert events == []
    may_step.set()
    for thread in [loop, *calls]:
        thread.join(LONG_S)
    assert events == [0, "call", "call", "call", 1, 2]


def test_generation_waits_while_the_turn_is_taken():
    turn, events = Turn(), []
    turn.ask()

    def generate():
        with turn.generating():
            events.append("step")

    loop = threading.Thread(target=generate)
    loop.start()
    loop.join(0.2)
    assert events == []
    turn.give_back()
    loop.join(LONG_S)
    assert events == ["step"]


def test_an_error_in_generation_gives_the_turn_back():
    turn = Turn()
    try:
        with turn.generating():
            raise ValueError("no")
    except ValueError:
        turn.ask()
    assert turn._is_taken
