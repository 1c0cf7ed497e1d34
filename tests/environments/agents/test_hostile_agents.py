"""Agents in processes that crash, hang, flood, lie and leave things behind: their faults stay their own."""

import asyncio
import time
from pathlib import Path

import pytest

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import talking_model
from hybridflow.environments import CallLimits, EnvironmentPool, EpisodeLimits, EpisodeStart, play_episodes
from hybridflow.environments.agents.agent_player import AgentPlayer
from hybridflow.environments.agents.endpoint import Endpoint
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.environments.processes import environment_pool
from hybridflow.rollout import EmbeddedRollout, SamplingParams

AGENTS = '''
import asyncio, ctypes, json, os, socket, subprocess, sys, time, urllib.error, urllib.request

NOTES = os.environ["NOTES"]
LATER = """
import sys, time, urllib.error, urllib.request
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/models", headers={"x-api-key": sys.argv[2]}))
        status = 200
    except urllib.error.HTTPError as error:
        status = error.code
    open(sys.argv[3], "a").write(f"{status}\\\\n")
    time.sleep(0.05)
"""


def send(base_url, key, messages, **more):
    body = {"model": "m", "messages": messages, "max_tokens": 12, **more}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), {"x-api-key": key})
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code


def ask(session, messages, **more):
    return asyncio.to_thread(send, session.base_url, session.api_key, messages, **more)


def user(text):
    return {"role": "user", "content": text}


def note(name, *words):
    with open(f"{NOTES}/{name}", "a") as file:
        print(*words, file=file)


async def agent(session, row):
    """Asks twice; between its turns it does what the row says."""
    deed, first = row["extra_info"]["deed"], [user(row["prompt"])]
    note(deed, session.base_url, session.api_key)
    said = await ask(session, first)
    result = await globals().get(deed, calm)(session)
    last = await ask(session, [*first, {"role": "assistant", "content": said}, user("on")])
    return result if result is not None else len(last) % 3


async def calm(session): ...


async def raises(session):
    raise RuntimeError("a fault")


async def exits(session):
    os._exit(3)


async def crashes(session):
    ctypes.string_at(0)


async def blocks(session):
    while True:
        time.sleep(1)


async def hangs(session):
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass


async def prints(session):
    for _ in range(3):
        print("x" * 10**6)
        print("y" * 10**6, file=sys.stderr)


async def nan(session):
    return float("nan")


async def posts(session):
    for value in (b"NaN", b"1" + b"0" * 400, b'"much"', b"{}"):
        request = urllib.request.Request(session.base_url + "/reward", value, {"x-api-key": session.api_key})
        try:
            await asyncio.to_thread(urllib.request.urlopen, request)
        except urllib.error.HTTPError as error:
            note("posted", error.code)


async def leaves(session):
    words = [session.base_url, session.api_key, f"{NOTES}/late"]
    subprocess.Popen([sys.executable, "-c", LATER, *words], start_new_session=True)


async def floods(session):
    head = f"x-api-key: {session.api_key}\\r\\n\\r\\n"
    port = int(session.base_url.split(":")[2].split("/")[0])
    path = session.base_url.split(str(port))[1]
    body = json.dumps({"model": "m", "messages": [user("flood")], "stream": True}).encode()
    whole = f"POST {path}/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: {len(body)}\\r\\n{head}".encode()
    for number in range(500):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall((whole + body)[: None if number % 2 else -5])
    large = [user("large " * 10**4)] * 20
    found = await asyncio.gather(*(ask(session, large) for _ in range(12)))
    note("flooded", *found)
    while await ask(session, [user("still")], max_tokens=1) == 429:
        await asyncio.sleep(0.05)


async def forges(session):
    others = [line.split() for name in os.listdir(NOTES) for line in open(f"{NOTES}/{name}") if "http" in line]
    for url, key in others:
        if url != session.base_url:
            note("forged", await asyncio.to_thread(send, url, session.api_key, [user("mine")]))
'''
TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
LIMITS = EpisodeLimits(turns=300, rows=300, tokens=120, context_tokens=500)
FAULTS = {
    "raises": "raised",
    "exits": "died",
    "crashes": "died",
    "blocks": "timeout",
    "hangs": "timeout",
    "nan": "raised",
}
OTHERS = ("prints", "posts", "leaves", "floods", "forges")


def play(directory, deeds):
    """Play an episode for each deed, and return them by deed."""
    limits = CallLimits(seconds=1.0, concurrency=32, agent_seconds=8.0)
    pool = EnvironmentPool({"talk": f"{directory}/agents.py:agent"}, num_processes=2, limits=limits)
    try:
        endpoint = asyncio.run_coroutine_threadsafe(_started(), pool.loop).result()
        renderers = Renderers(TOKENIZER)

        def start_of(deed, number):
            def session():
                return Session(TurnTree(renderers, [STOP], LIMITS), None)

            player = AgentPlayer(pool.agent("talk", number), session, endpoint)
            row = {"prompt": f"question {number % 3}", "extra_info": {"deed": deed}}
            return EpisodeStart(player, row, (7, number))

        starts = [start_of(deed, number) for number, deed in enumerate(deeds)]
        sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
        engine = EmbeddedRollout(talking_model(TOKENIZER), tokenizer=TOKENIZER)
        episodes = play_episodes(engine, starts, sampling, pool.loop)
        while "hangs" not in deeds and "410" not in (directory / "calm" / "late").read_text():
            time.sleep(0.01)  # the process that it has left behind sends on
        pool.renew()
    finally:
        pool.close()
    return dict(zip(deeds, episodes, strict=True))


async def _started():
    endpoint = Endpoint()
    await endpoint.start()
    return endpoint


def processes_with(text):
    """Return the processes whose command line has a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().decode(errors="replace"):
                found.append(path)
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.runs
@pytest.mark.own_run("episodes: hostile agents in processes")
def test_hostile_agents_fail_alone_and_change_no_other_episode(tmp_path, monkeypatch):
    (tmp_path / "agents.py").write_text(AGENTS)
    monkeypatch.setattr(environment_pool, "GRACE_S", 2.0)
    good = [f"good {number}" for number in range(4)]
    played = {}
    for name, deeds in (("calm", [*good, "leaves"]), ("hostile", [*good, *FAULTS, *OTHERS])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "late").touch()
        monkeypatch.setenv("NOTES", str(tmp_path / name))
        played[name] = play(tmp_path, deeds)
    calm, hostile = played["calm"], played["hostile"]
    assert {deed: each.failure for deed, each in hostile.items() if each.failure} == FAULTS, {
        deed: each.episode.error for deed, each in hostile.items()
    }
    for deed in FAULTS:
        assert hostile[deed].rewards == {}
        assert hostile[deed].episode.ended == "error"
    for deed in good:
        for row, undisturbed in zip(hostile[deed].rows, calm[deed].rows, strict=True):
            assert (row.context, row.is_sampled) == (undisturbed.context, undisturbed.is_sampled)
            assert row.log_probs == pytest.approx(undisturbed.log_probs, abs=1e-4)
        assert hostile[deed].rewards == calm[deed].rewards
    notes = tmp_path / "hostile"
    lives = [line.split() for line in (notes / "exits").read_text().splitlines()]
    assert len({address for address, _ in lives}) == len({key for _, key in lives}) == 2
    assert set((notes / "posted").read_text().split()) == {"400"}
    assert set((notes / "forged").read_text().split()) <= {"401", "404", "410"}
    assert {"413"} <= set((notes / "flooded").read_text().split()) <= {"413", "429"}
    assert processes_with(str(tmp_path)) == []
