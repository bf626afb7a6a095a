"""The table cache's counters in Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from sgl_vegas.tables.prefix_tables import EVENTS

MEANINGS = {
    "hits": "Requests that drafted first by the table of their cached prefix.",
    "misses": "Requests whose cached prefix had no table, or reached too little of the prompt.",
    "stores": "Tables kept with a cached prefix.",
    "evictions": "Tables dropped because the table cache was full.",
}


def prometheus_counters(
    model_name: str | None, extra_labels: dict[str, str] | None
) -> Callable[[str], None]:
    """What counts an event of the table cache, by its name in EVENTS."""
    # SGLang sets the directory that processes share before this import may happen.
    from prometheus_client import Counter

    labels = {"model_name": model_name or "", **(extra_labels or {})}
    counters = {
        event: Counter(
            name=f"sglang:vegas_table_cache_{event}",
            documentation=MEANINGS[event],
            labelnames=list(labels),
        ).labels(**labels)
        for event in EVENTS
    }
    return lambda event: counters[event].inc()
