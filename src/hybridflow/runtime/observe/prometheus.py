"""The tracker of `trainer.trackers = ["prometheus"]`: an endpoint with the newest value of each metric."""

import re
from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.runtime.observe.tracker import CleanNumbers, needing, utf8_text

LOOPBACK = "127.0.0.1"


def gauge_name(name: str) -> str:
    """Return the name of the gauge of a metric."""
    return f"hybridflow_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


class PrometheusTracker:
    """A tracker that serves `http://127.0.0.1:PORT/metrics`, to this machine only; `port` 0 takes a free one.

    The gauge of `critic/score/mean` is `hybridflow_critic_score_mean`, that of the step `hybridflow_step`; each has the
    label `run`. Raises ConfigError if the package is missing or the port is taken.
    """

    def __init__(self, port: int, name: str) -> None:
        with needing("prometheus"):
            import prometheus_client
        self._gauge: Any = prometheus_client.Gauge
        self._registry, self._gauges = prometheus_client.CollectorRegistry(), dict[str, Any]()
        self._name, self._numbers = utf8_text(name), CleanNumbers(gauge_name)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, LOOPBACK, self._registry)
        except OSError as error:
            raise ConfigError(
                f"trainer.prometheus_port={port} cannot be used: {error}; choose another one, or 0 for a free one."
            ) from error
        self._is_open = True

    @property
    def address(self) -> str:
        """The address of the endpoint."""
        return f"http://{LOOPBACK}:{self._server.server_port}/metrics"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Set the gauges to the numbers of a step."""
        for name, number in self._numbers({**metrics, "step": step}).items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, name, ["run"], registry=self._registry)
            self._gauges[name].labels(run=self._name).set(number)

    def close(self) -> None:
        """Stop the endpoint."""
        if self._is_open:
            self._is_open = False
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
