"""Entry point of an environment process: holds the environments of many episodes, and answers their questions.

It is started as a file. A frame of input is a pickle of (number, episode, name, question), the first one that of the
classes by value, if there are some; a reply is JSON with the number and the answer. `beat` replies show that the event
loop is not blocked; `num_stuck` counts calls of tools that were given up but still run in their threads.
"""

import asyncio
import importlib.util
import json
import os
import pickle
import sys
import threading
from typing import Any

BEAT_S = 0.5
"""Seconds between two signs of life."""


def main() -> None:
    """Load the classes that the settings in the first argument name, and answer questions until stdin ends."""
    settings = json.loads(sys.argv[1])
    process = _module_of(settings["reward_process"])
    replies, questions = process.connected(settings["memory_bytes"])
    folders = dict.fromkeys(
        os.path.dirname(os.path.abspath(source))
        for source in (name.rpartition(":")[0] for name in settings["classes"].values())
        if source.endswith(".py")
    )
    sys.path[:1] = list(folders)  # in place of this file's directory, as if the user's files were run
    sys.path.append(os.getcwd())
    from hybridflow.environments.episodes.kinds import EnvironmentKind
    from hybridflow.errors import EnvironmentConfigError
    from hybridflow.runtime.user_code import load_user_function

    classes: dict[str, Any] = {}
    try:
        kinds = []
        given = process.receive(questions) if settings["by_value"] else {}
        for name, source in settings["classes"].items():
            if source in given:
                contents, paths = given[source]
                sys.path += [path for path in paths if path not in sys.path]
                classes[name], digest = pickle.loads(contents), ""
            else:
                key = f"environment.classes.{name}"
                classes[name] = load_user_function(source, key, EnvironmentConfigError, is_class=True)
                digest = process.source_of(classes[name])
            kinds.append(EnvironmentKind.of(classes[name], source, digest))
    except BaseException as error:  # a user's file may raise anything
        is_ours = isinstance(error, EnvironmentConfigError)
        replies.send({"not_loaded": str(error) if is_ours else process.described(error, None)})
        return
    replies.send({"ready": True, "kinds": [kind.to_message() for kind in kinds]})
    asyncio.run(_serve(classes, process.receive, questions, replies, settings))


async def _serve(classes: dict[str, Any], receive: Any, incoming: Any, replies: Any, settings: dict[str, Any]) -> None:
    from hybridflow.environments.episodes.answers import Answer, Finish, ScoreGroup
    from hybridflow.environments.processes.host import CallLimits, EnvironmentHost

    limits = CallLimits(settings["timeout_s"], settings["concurrency"])
    slots = asyncio.Semaphore(limits.concurrency)
    loop, questions = asyncio.get_running_loop(), asyncio.Queue[Any]()
    hosts: dict[int, EnvironmentHost] = {}

    def read() -> None:
        while (question := receive(incoming)) is not None:
            loop.call_soon_threadsafe(questions.put_nowait, question)
        loop.call_soon_threadsafe(questions.put_nowait, None)

    async def answer(number: int, episode: int, name: str, question: Any) -> None:
        host = hosts.get(episode) or hosts.setdefault(episode, EnvironmentHost(classes[name], limits, slots))
        try:
            found = await host.answer(question)
        except BaseException as error:  # user code may cancel all tasks; an answer is owed in any case
            found = Answer(failure="raised", error=f"the episode was cancelled: {type(error).__name__}")
        if isinstance(question, Finish | ScoreGroup):
            hosts.pop(episode, None)
        replies.send({"number": number, "answer": found.to_message()})

    async def beat() -> None:
        while True:
            replies.send({"beat": True, "num_stuck": EnvironmentHost.num_stuck})
            await asyncio.sleep(BEAT_S)

    threading.Thread(target=read, daemon=True).start()
    tasks: set[asyncio.Task[None]] = {asyncio.create_task(beat())}
    while (question := await questions.get()) is not None:
        task = asyncio.create_task(answer(*question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(0)  # calls of the user's code may still run


def _module_of(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("reward_process", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
