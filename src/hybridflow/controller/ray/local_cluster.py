"""A local Ray cluster for one run, removed completely when the run ends. It does not know workers.

    driver ── ray.init ──> gcs, raylet ──> agents, actors ──> their children      all have the session's token
       └──── pipe ───────> reaper: when the pipe closes, stops all processes with the token, removes the directory

Ray stops its own processes when the driver calls `ray.shutdown`, but not all of them when the driver is killed, and
never removes its directory. The reaper does both: its pipe closes even if the driver is killed.
"""

import atexit
import contextlib
import functools
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from hybridflow.controller.ray.reaper import SESSION_VARIABLE, cluster_processes
from hybridflow.controller.worker import variables
from hybridflow.errors import ConfigError, LostClusterError, WorkerError
from hybridflow.runtime.stop_signals import signals_after

_MIN_OBJECT_STORE_BYTES = 75 * 2**20
_REAPER = Path(__file__).with_name("reaper.py")
_REAPER_TIMEOUT_S = 30.0
_NICENESS = "RAY_worker_niceness"
# The path of a unix socket has at most 107 bytes; the part below the temporary directory takes up to 90.
_LONGEST_TEMPORARY_DIRECTORY = 13

_pipes: set[int] = set()
"""The write ends of the pipes to the reapers of this process."""


class LocalCluster:
    """A Ray cluster with these logical resources, from `start()` to `stop()`, or in a `with` block.

    `num_cpus` is rounded up and may exceed the cores of the machine. `object_store_bytes`: shared memory for values,
    by default Ray's choice. All sockets listen on the loopback interface, and a token of the run denies access to other
    users of the machine. No file is written outside `directory`, and no network request is made. Workers have the
    priority of this process, unless the variable RAY_worker_niceness is set (Ray's default is 15).

    Call `start` in a thread that lives as long as the cluster: the kernel stops Ray's processes when the thread that
    started them ends.
    """

    def __init__(self, num_cpus: float, num_gpus: int = 0, object_store_bytes: int | None = None) -> None:
        if not 0 < num_cpus < math.inf:
            raise ConfigError(f"num_cpus={num_cpus} is invalid for a Ray cluster: expected a finite positive number.")
        if num_gpus < 0:
            raise ConfigError(f"num_gpus={num_gpus} is negative; use 0 for a Ray cluster without GPUs.")
        if object_store_bytes is not None and object_store_bytes < _MIN_OBJECT_STORE_BYTES:
            raise ConfigError(
                f"object_store_bytes={object_store_bytes} is below Ray's minimum; "
                f"use at least {_MIN_OBJECT_STORE_BYTES}, or None for Ray's choice."
            )
        self.num_cpus = math.ceil(num_cpus)
        self.num_gpus = num_gpus
        self.object_store_bytes = object_store_bytes
        self.session: str | None = None
        """The token of the last start; `cluster_processes(session)` returns its processes."""
        self.directory: Path | None = None
        """The directory of Ray's sockets, logs and spilled objects; it exists as long as the cluster."""
        self._undo: contextlib.ExitStack | None = None
        self._driver_pid = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the cluster and connect to it.

        Raises ConfigError if this process already has a Ray cluster, WorkerError if Ray cannot start with these
        resources, LostClusterError if a service does not answer in time. A failed start is cleaned up.
        """
        if self._undo is not None:
            raise ConfigError("this Ray cluster is already started; call stop() before starting it again.")
        loaded_ray = sys.modules.get("ray")
        if loaded_ray is not None and loaded_ray.is_initialized():
            raise ConfigError(
                "Ray is already initialized in this process; call ray.shutdown(), or stop the LocalCluster in use."
            )
        session = secrets.token_hex(16)
        with contextlib.ExitStack() as undo:
            undo.callback(_let_ray_read_variables)
            undo.enter_context(variables(_variables_of_run()))
            with signals_after("the import of Ray"):
                ray = _import_ray()
                _let_ray_read_variables()
                undo.enter_context(_ray_settings())
            directory = undo.enter_context(_reaped_directory(session))
            undo.callback(_shut_down)
            try:
                # Processes that the driver starts later do not belong to the cluster and must not have its token.
                own = {SESSION_VARIABLE: session, "PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT", "")}
                with variables(own), while_ray_starts():
                    ray.init(
                        address="local",  # ignores RAY_ADDRESS
                        num_cpus=self.num_cpus,
                        num_gpus=self.num_gpus,
                        object_store_memory=self.object_store_bytes,
                        include_dashboard=False,
                        log_to_driver=True,
                        configure_logging=False,
                        # Ray makes its directory accessible to all users, so it is put into a private one.
                        _temp_dir=str(directory / "r"),
                    )
            except Exception as error:
                kind = WorkerError if isinstance(error, ValueError) else LostClusterError  # a service died
                raise kind(f"Ray failed to start: {str(error) or type(error).__name__}") from error
            atexit.register(self.stop)
            undo.callback(atexit.unregister, self.stop)
            self.session, self.directory, self._driver_pid = session, directory, os.getpid()
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Stop all processes of the cluster and remove its files before returning.

        Stopping twice is allowed. Raises WorkerError if a process cannot be stopped.
        """
        if self._undo is None or self._driver_pid != os.getpid():  # a forked child has a copy of this object
            return
        undo, self._undo = self._undo, None
        self.continue_processes()
        undo.close()

    def continue_processes(self) -> None:
        """Let processes of the cluster continue that are stopped (SIGSTOP), since Ray would wait for them forever."""
        for pid in cluster_processes(self.session) if self.session else ():
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGCONT)


def _variables_of_run() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray creates one and writes it into the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_CLIENT_MODE": "0",  # Ray sets it on import
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # not a cluster of machines: listen on the loopback interface
        # By default Ray runs workers at niceness 15, so that other programs starve the ranks.
        _NICENESS: os.environ.get(_NICENESS, "0"),
        "SPT_NOENV": "1",  # Ray's processes rename themselves, which would overwrite the token in their environment
    }


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray cannot be imported ({error}); install it with `pip install ray`.") from error
    return ray


def _let_ray_read_variables() -> None:
    """Make Ray read the authentication mode and token again; it keeps those of its import or of the last cluster."""
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _ray_settings() -> Iterator[None]:
    """Set Ray's options that are module attributes, some of them read from the environment on import."""
    from ray._private import node, ray_constants, services

    settings = (
        # Only the driver handles a signal to its process group, as a scheduler sends it.
        (services, "ConsolePopen", functools.partial(services.ConsolePopen, start_new_session=True)),
        (ray_constants, "ENABLE_RAY_CLUSTER", False),
        # Under `uv run`, Ray would copy the working directory and build an environment for the workers.
        (ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False),
        # Without a dashboard, this process only detects the cloud provider over the network, for usage statistics.
        (node.Node, "start_api_server", lambda self, **_: None),
    )
    with contextlib.ExitStack() as undo:
        for owner, name, value in settings:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def while_ray_starts() -> Iterator[None]:
    """Let signals wait until Ray has started, and keep the handler of SIGTERM: Ray's exits with status 15."""
    from ray._private import utils

    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        with signals_after("the start of Ray"):
            yield
    finally:
        utils.set_sigterm_handler = set_handler


def _directory_of(session: str) -> Path:
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_TEMPORARY_DIRECTORY:
        parent = "/tmp"
    return Path(parent, f"hybridflow-{session[:12]}")


def _shut_down() -> None:
    import ray._private.worker

    try:
        ray.shutdown()
    finally:
        # At exit, Ray would resume an interrupted shutdown and create removed directories again.
        ray._private.worker._global_node = None


@contextlib.contextmanager
def _reaped_directory(session: str) -> Iterator[Path]:
    """Create a directory; remove it and all processes of the session on exit, even if the driver is killed."""
    read_end, write_end = os.pipe()
    _pipes.add(write_end)
    try:
        directory = _directory_of(session)
        reaper = _Reaper(session, directory, read_end)
        directory.mkdir(mode=0o700)  # after the start of the reaper that removes it
    except OSError as error:
        _close(write_end)
        raise WorkerError(
            f"the directory of the Ray cluster or its reaper could not be created: {error}; set TMPDIR to a writable "
            f"directory with a path of at most {_LONGEST_TEMPORARY_DIRECTORY} characters."
        ) from error
    except BaseException:
        _close(write_end)
        raise
    try:
        yield directory
    finally:
        _close(write_end)
        reaper.wait()


class _Reaper:
    """The reaper of a session, and the next one if it is killed before its work is done."""

    def __init__(self, session: str, directory: Path, pipe: int) -> None:
        self._arguments = session, directory, pipe
        try:
            self._process = _start_reaper(*self._arguments)
        except BaseException:
            os.close(pipe)
            raise
        self._thread = threading.Thread(target=self._keep, name="reaper", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while self._process.wait() < 0:  # by a signal
            self._process = _start_reaper(*self._arguments)
        os.close(self._arguments[2])

    def wait(self) -> None:
        """Wait until the reaper is done, after the pipe was closed. Raises WorkerError if it does not end."""
        self._thread.join(_REAPER_TIMEOUT_S)
        if self._thread.is_alive():
            raise WorkerError(
                f"Ray's processes {cluster_processes(self._arguments[0])} still run {_REAPER_TIMEOUT_S:.0f} s after "
                f"they were killed; the reaper, process {self._process.pid}, continues. Inspect them with `ps -o "
                "pid,stat,wchan,args`."
            )


def _start_reaper(session: str, directory: Path, stdin: int) -> subprocess.Popen[bytes]:
    # In an actor of another cluster, this process has that cluster's token, and its reaper must not stop ours.
    environment = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_REAPER), session, str(directory)],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
    )


def _close(write_end: int) -> None:
    if write_end in _pipes:  # in a forked child, the descriptor may belong to another file by now
        _pipes.remove(write_end)
        os.close(write_end)


def _close_pipes_in_forked_child() -> None:
    # An open copy in a child that outlives the driver would keep the reapers waiting.
    while _pipes:
        os.close(_pipes.pop())


os.register_at_fork(after_in_child=_close_pipes_in_forked_child)
