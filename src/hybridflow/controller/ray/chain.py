"""Who waits for whom: the calls from the one that the controller waits for to the one that runs."""

from hybridflow.controller.ray.processes import RayCall


def chain_of(call: RayCall) -> list[tuple[str, RayCall]]:
    """Return the call and the calls that must finish before it, up to the running one, each after what it is for.

    [("waits for", score), ("which reads the result of", generate), ("which runs after", load)]
    """
    chain = [("waits for", call)]
    while not call.is_finished:
        if (before := call.predecessor()) is not None:
            chain.append(("which runs after", call := before))
        elif (awaited := call.awaited()) is not None:
            chain.append(("which reads the result of", call := awaited))
        else:
            break
    return chain


def running_call(call: RayCall) -> RayCall:
    """Return the running call that a call waits for: itself, an older one of its process, or one that it reads."""
    return chain_of(call)[-1][1]


def describe_chain(call: RayCall) -> str:
    """Return the chain as a sentence."""
    links = [f"{link} {each.where} on {each.worker.name}" for link, each in chain_of(call)]
    return f"The controller {', '.join(links)}, which runs."
