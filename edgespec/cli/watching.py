"""How the operator of a verifier watches it: metrics over HTTP; a line of log and a span for each
stream.

What nobody asked for is not built, and a verifier that nobody watches counts nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgespec import __version__
from edgespec.cli.running import say
from edgespec.config import VerifierConfig
from edgespec.config.setup_error import SetupError, needs
from edgespec.telemetry.access_log import log_stream
from edgespec.telemetry.engine_sample import sample_engine
from edgespec.telemetry.metric_values import MetricValues
from edgespec.telemetry.spans import StreamSpans, stream_spans
from edgespec.telemetry.stream_meter import Ended, StreamMeter
from edgespec.telemetry.watch import Watch
from edgespec.verifier.daemon import Verifier

if TYPE_CHECKING:
    from edgespec.telemetry.metrics_server import MetricsServer


class Watching:
    """``watch`` is for ``build_verifier``; None when nothing is to be counted."""

    def __init__(self, metrics: MetricsServer | None, spans: StreamSpans | None = None) -> None:
        logged = logging.getLogger("edgespec").isEnabledFor(logging.INFO)
        ended: list[Ended] = [log_stream] if logged else []
        if spans is not None:
            ended.append(spans)
        self.watch = Watch(StreamMeter(*ended)) if ended or metrics is not None else None
        self._metrics, self._spans = metrics, spans

    @property
    def metrics_port(self) -> int | None:
        """Where the metrics are; None without."""
        return None if self._metrics is None else self._metrics.port

    def start(self, verifier: Verifier) -> None:
        """The verifier serves from now on; call on its event loop."""
        if self._metrics is None or self.watch is None:
            return
        self.watch.lag.start(asyncio.get_running_loop())
        model, engine = verifier.info.model.name, verifier.engine
        self._metrics.start(
            MetricValues(self.watch, lambda: sample_engine(engine), model, __version__)
        )

    def close(self) -> None:
        """Let go of the port, and send the last spans."""
        if self.watch is not None:
            self.watch.lag.stop()
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            self._spans.close()


@contextmanager
def watching(config: VerifierConfig) -> Iterator[Watching]:
    """Takes the port of the metrics at once, before a model is loaded. Raises ``SetupError``."""
    metrics = None if config.metrics_port is None else _metrics_server(config)
    found = Watching(metrics, stream_spans(os.environ))
    try:
        yield found
    finally:
        found.close()


def _metrics_server(config: VerifierConfig) -> MetricsServer:
    assert config.metrics_port is not None
    with needs("prometheus-client", "edgespec[server]"):
        from edgespec.telemetry.metrics_server import MetricsServer
    host, port = config.metrics_host, config.metrics_port
    shown = f"[{host}]" if ":" in host else host
    try:
        server = MetricsServer(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        hint = "; choose another with --metrics-port" if error.errno == errno.EADDRINUSE else ""
        raise SetupError(f"cannot serve metrics on {shown}:{port}: {why}{hint}") from error
    say(f"metrics on http://{shown}:{server.port}/metrics")
    return server
