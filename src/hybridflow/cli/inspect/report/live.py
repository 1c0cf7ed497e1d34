"""A server that shows the page of some runs while they go on, to this machine only."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from hybridflow.cli.inspect.report.page import make_page, to_page_json
from hybridflow.cli.inspect.report.page_data import page_data
from hybridflow.cli.inspect.run_table import run_row
from hybridflow.errors import HybridFlowError
from hybridflow.runtime.observe.log import get_logger
from hybridflow.runtime.observe.run_files import METRICS, RECOVERIES, ROLLOUTS, SAMPLES, RunFiles
from hybridflow.runtime.observe.trace import TRACE_FILE

logger = get_logger(__name__)

LOOPBACK = "127.0.0.1"
Answer = tuple[HTTPStatus, str, str, str]
"""Status, type, text, and version of the text."""

HOSTS = (LOOPBACK, "localhost")
"""Names under which a browser may ask; under another one a foreign page could read the run (DNS rebinding)."""

PAUSE_S = 0.5
IDLE_S = 60.0
"""Seconds after which a connection that neither asks nor reads is closed."""

MOST_CONNECTIONS = 32
"""Connections at a time; more are closed at once, so that they do not take the open files that reading a run needs."""

WATCHED = (METRICS, SAMPLES, ROLLOUTS, RECOVERIES, TRACE_FILE, "run.json")


class LiveServer(ThreadingHTTPServer):
    """The server of the page of the runs in `directories`; `port` 0 takes a free one. Serve with `serve_forever`.

    Raises OSError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, directories: Sequence[Path], port: int) -> None:
        self._directories = directories
        self._names = [RunFiles(directory).name for directory in directories]
        self._lock, self._version, self._json = Lock(), "", ""
        self._places = BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((LOOPBACK, port), partial(_Handler, self))

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; pause if the process has no file left for it, since it then stays in the queue."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is a place for one more connection, and take it."""
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request in its thread, and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless the browser has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            logger.exception("a request cannot be answered")

    def version(self) -> str:
        """Return a text that changes whenever a file of the runs, or the state of one, does."""
        states: list[object] = [_state(directory / name) for directory in self._directories for name in WATCHED]
        states += [run_row(directory).state for directory in self._directories]
        return f'"{hashlib.sha256(repr(states).encode()).hexdigest()[:16]}"'

    def page(self) -> str:
        """Return the page."""
        return make_page(self._names, self.data(self.version()), is_live=True)

    def data(self, version: str) -> str:
        """Return the data of the page as JSON; they are read once for each version."""
        with self._lock:
            if version != self._version:
                self._json = to_page_json(page_data([RunFiles(directory) for directory in self._directories]))
                self._version = version
            return self._json


class _Handler(BaseHTTPRequestHandler):
    server_version = "hybridflow"
    sys_version = ""
    timeout = IDLE_S

    def __init__(self, live: LiveServer, *args: Any) -> None:
        self._live = live
        super().__init__(*args)  # which answers the request

    def do_GET(self) -> None:
        """Answer with the page, its data, or that neither changed."""
        if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:
            return self._send(
                HTTPStatus.FORBIDDEN, "text/plain", f"ask for http://{LOOPBACK}:{self._live.server_port}/"
            )
        answers: dict[str, Callable[[], Answer]] = {"/": self._page, "/data.json": self._data}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is only the page /")
        try:
            found = answer()
        except (HybridFlowError, OSError) as error:  # the page says so, and shows the run again when it is mended
            found = HTTPStatus.CONFLICT, "text/plain", str(error), ""
        except Exception as error:
            logger.exception("the page cannot be made")
            found = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error!r}; hybridflow watch has printed more", ""
        return self._send(*found)

    def _page(self) -> Answer:
        return HTTPStatus.OK, "text/html", self._live.page(), ""

    def _data(self) -> Answer:
        version = self._live.version()
        if self.headers.get("If-None-Match") == version:
            return HTTPStatus.NOT_MODIFIED, "", "", ""
        return HTTPStatus.OK, "application/json", self._live.data(version), version

    def _send(self, status: HTTPStatus, kind: str, text: str, version: str = "") -> None:
        body = text.encode("utf-8", errors="surrogatepass" if kind == "application/json" else "replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8" if kind else "",
            "ETag": version,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Content-Security-Policy": "frame-ancestors 'none'",  # which the page's own policy cannot say
        }.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests: the page asks every two seconds."""


def _state(path: Path) -> tuple[int, int] | None:
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns
