"""Which groups of a run get new processes, decided on groups that are made up."""

from types import SimpleNamespace

import pytest

from hybridflow.trainers.run.recovery.restarted_groups import SETTLE_TIMEOUT_S, RestartedGroups


class Backend:
    """Records what it is asked for; the workers in `failed` cannot go on."""

    def __init__(self, *failed):
        self.failed, self.log = failed, []

    def settle(self, workers, timeout_s):
        assert timeout_s == SETTLE_TIMEOUT_S
        return [worker for worker in workers if worker in self.failed]

    def restart(self, workers):
        self.log.append(("restart", workers))

    def keep_standbys(self, workers):
        self.log.append(("standbys", workers))


def groups_of(backend, **options):
    abandoned = lambda name: lambda: backend.log.append(("abandon", name))  # noqa: E731
    groups = {
        name: SimpleNamespace(workers=workers, methods=methods, abandon_step=abandoned(name))
        for name, workers, methods in [("actor", ["a0", "a1"], ["abandon_step"]), ("judge", ["j0"], [])]
    }
    return RestartedGroups(backend, groups, **{"connected": False, **options})


@pytest.mark.parametrize(
    ("failed", "also", "connected", "restarted"),
    [
        ([], [], True, []),
        (["a1"], [], False, ["actor"]),
        (["a1"], [], True, ["actor", "judge"]),
        (["a1"], ["judge"], False, ["actor", "judge"]),
        ([], ["judge"], False, ["judge"]),
        ([], ["judge"], True, ["actor", "judge"]),
    ],
)
def test_failed_groups_and_those_connected_to_them_are_restarted(failed, also, connected, restarted):
    assert groups_of(Backend(*failed), connected=connected).settle(also) == restarted


def test_groups_that_go_on_discard_the_unfinished_step():
    backend = Backend()
    groups = groups_of(backend)
    groups.restart(["judge"])
    groups.restart(["actor"])
    assert backend.log == [("restart", ["j0"]), ("abandon", "actor"), ("restart", ["a0", "a1"])]


def test_groups_that_move_get_their_processes_there():
    backend = Backend()
    groups_of(backend, move=lambda names: names[:1]).restart(["actor", "judge"])
    assert backend.log == [("restart", ["j0"])]


def test_standbys_are_kept_only_if_wanted():
    backend = Backend()
    groups_of(backend).keep_standbys()
    groups_of(backend, standby=True).keep_standbys()
    assert backend.log == [("standbys", ["a0", "a1", "j0"])]
