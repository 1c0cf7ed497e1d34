"""The emulated slow link: a round trip takes twice its delay, and nothing of it is left."""

import subprocess
import sys

import pytest

PORT = "5000"  # of a namespace that has no other program

ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(1):
    connection.sendall(data)
"""

ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        seconds.append(time.perf_counter() - start)
print(min(seconds))
"""


def namespaces():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: programs at both ends of a link")
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_a_round_trip_takes_twice_the_delay(links, delay_s):
    with links.delayed_link(delay_s) as names:
        answer = names.command(names.far, [sys.executable, "-c", ANSWER, links.FAR, PORT])
        with subprocess.Popen(answer, stdout=subprocess.PIPE, text=True) as answering:
            assert answering.stdout.readline() == "ready\n"
            ask = names.command(names.near, [sys.executable, "-c", ASK, links.FAR, PORT])
            done = subprocess.run(ask, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert 2 * delay_s <= float(done.stdout) < 2 * delay_s + 0.3
        assert {names.near, names.far} <= namespaces()
    assert not {names.near, names.far} & namespaces()
