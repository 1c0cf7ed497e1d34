"""Draws the random faults of a run (`faults.random`): a function of the configuration, the roles and the steps."""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from hybridflow.config import Config, RoleName
from hybridflow.config.faults import DRIVER, PHASES, Fault, kinds_at, phases_of, workers_of
from hybridflow.runtime.random_streams import uniform


def draw_faults(config: Config, roles: Collection[RoleName], total_steps: int) -> list[Fault]:
    """Return faults.random faults, in order of their steps.

    Phases are drawn equally often, in each phase its kinds, and for each kind the workers that pass the phase. The
    steps are spread over the run. A stopped driver is not drawn, since nothing in the run can continue it.
    """
    num_faults, seed = config.faults.random, config.faults.seed
    workers = {
        f"{role}/{rank}" if role != DRIVER else DRIVER: phases_of(config, role)
        for role, ranks in workers_of(config, roles).items()
        for rank in range(ranks)
    }
    used: Counter[tuple[str, ...]] = Counter()

    def draw(number: int, options: Iterable[str], *within: str) -> str:
        """Return one of the options that were drawn least often, by chance."""
        names = list(options)
        least = min(used[*within, name] for name in names)
        rarest = [name for name in names if used[*within, name] == least]
        chosen = rarest[int(uniform(seed, number, len(within)) * len(rarest))]
        used[*within, chosen] += 1
        return chosen

    faults = []
    order = np.argsort(uniform(seed, num_faults, np.arange(num_faults)))
    for number, place in enumerate(order.tolist()):
        phase = draw(number, [phase for phase in PHASES if any(phase in passed for passed in workers.values())])
        here = [worker for worker, phases in workers.items() if phase in phases]
        apply = {worker: kinds_at(config, worker, phase) for worker in here}
        kinds = [kind for kind in PHASES[phase].kinds if any(kind in kinds for kinds in apply.values())]
        kind = draw(number, [kind for kind in kinds if here != [DRIVER] or kind != "stop"], phase)
        worker = draw(number, [worker for worker in here if kind in apply[worker]], phase, kind)
        step = 1 + int((place + uniform(seed, number, 3)) * total_steps / num_faults)
        faults.append(Fault(min(step, total_steps), kind, worker, phase))
    return sorted(faults, key=lambda fault: fault.step)
