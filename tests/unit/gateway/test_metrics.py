"""The gateway's own kind of histogram."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from octavo.gateway.metrics import EventHistogram

BUCKETS = (0.002, 0.5, 1.0)


def samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    [family] = registry.collect()
    assert (family.name, family.type, family.documentation) == ("gap", "histogram", "Time between.")
    return [(s.name, s.labels, s.value) for s in family.samples if not s.name.endswith("_created")]


def test_event_histogram_shows_what_a_histogram_of_the_library_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    events = EventHistogram("gap", "Time between.", BUCKETS, ours)
    histogram = Histogram("gap", "Time between.", buckets=BUCKETS, registry=theirs)
    for value, count in ((0.002, 1), (0.25, 3), (0.5, 2), (7.0, 1)):
        events.observe(value, count)
        for _ in range(count):
            histogram.observe(value)
    assert samples(ours) == samples(theirs)
    assert ("gap_bucket", {"le": "0.5"}, 6) in samples(ours)
