"""Count the calls, also in the Prometheus registry that vLLM exposes."""

from __future__ import annotations

from typing import Any

from gvr_topk.integrations._kit.counters import CALLS, Counters
from gvr_topk.integrations._kit.log import Say, one_line


class CallMetrics:
    """`Counters` whose calls are also a metric of the process's default Prometheus registry, if there is one.

    A plain Prometheus counter serves both setups of vLLM: with several API servers it is written to the files
    of ``PROMETHEUS_MULTIPROC_DIR``, which engine processes share; without them it is in this process alone.
    """

    def __init__(self, say: Say) -> None:
        self.counters = Counters()
        self._say = say
        self._metric: Any = None
        self._children: dict[tuple[str, str], Any] = {}

    def open(self) -> None:
        """Add the metric to the registry; an `ImportError` or a `ValueError` where that cannot be."""
        from prometheus_client import Counter

        name, text, labels = CALLS
        self._metric = Counter(f"gvr_topk_{name}", text, labels)

    def close(self) -> None:
        """Remove the metric from the registry."""
        if self._metric is not None:
            from prometheus_client import REGISTRY

            REGISTRY.unregister(self._metric)
            self._metric = None
            self._children.clear()

    def count(self, path: str, reason: str) -> None:
        """Count one call, eager or captured."""
        key = path, reason
        self.counters.count(path, reason)
        if self._metric is None:
            return
        try:
            if key not in self._children:
                self._children[key] = self._metric.labels(*key)
            self._children[key].inc()
        except (OSError, ValueError) as error:  # an engine must not fail because of a file
            self.close()
            self._say("warning", f"no metric of calls from now on: {one_line(error)}")
