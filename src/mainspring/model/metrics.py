"""Counters, gauges and histograms, and Prometheus' text format.

No library: plain integers and lists cost nothing to update, and the text format is short to
write. A test parses it with Prometheus' own parser.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

MetricKind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of every histogram: from a millisecond, the unit of due times, to a long outage."""


class Histogram:
    """Durations counted by bucket, with their number and sum."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += times
        self.total_s += seconds * times


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One line of output. `suffix` names a part of a histogram."""

    labels: Labels
    value: float
    suffix: str = ""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """All samples of one name."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[Sample, ...]


def family(name: str, kind: MetricKind, text: str, label: str, values: Mapping[str, float]) -> Family:
    """Return a family with one sample for each value of one label."""
    return Family(name, kind, text, tuple(Sample(((label, key),), value) for key, value in sorted(values.items())))


def single(name: str, kind: MetricKind, text: str, value: float) -> Family:
    return Family(name, kind, text, (Sample((), float(value)),))


def histogram(name: str, text: str, label: str, found: Mapping[str, Histogram]) -> Family:
    samples: list[Sample] = []
    for key, one in sorted(found.items()):
        samples += _parts(((label, key),), one)
    return Family(name, "histogram", text, tuple(samples))


def _parts(labels: Labels, one: Histogram) -> Iterator[Sample]:
    below = 0
    for bound, count in zip(SECONDS, one.counts, strict=False):
        below += count
        yield Sample((*labels, ("le", _number(bound))), below, "_bucket")
    every = below + one.counts[-1]
    yield Sample((*labels, ("le", "+Inf")), every, "_bucket")
    yield Sample(labels, one.total_s, "_sum")
    yield Sample(labels, every, "_count")


def labelled(families: Iterable[Family], label: str, value: str) -> list[Family]:
    """Return the families with one more label on every sample."""
    return [
        msgspec.structs.replace(
            one,
            samples=tuple(msgspec.structs.replace(each, labels=((label, value), *each.labels)) for each in one.samples),
        )
        for one in families
    ]


def merged(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """Merge the families of several processes: the format allows each name once."""
    found: dict[str, Family] = {}
    for families in parts:
        for one in families:
            known = found.get(one.name)
            found[one.name] = (
                one if known is None else msgspec.structs.replace(known, samples=known.samples + one.samples)
            )
    return list(found.values())


def render(families: Iterable[Family]) -> str:
    """Return the families in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for one in families:
        lines += (f"# HELP {one.name} {_escaped(one.help)}", f"# TYPE {one.name} {one.kind}")
        for sample in one.samples:
            labels = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in sample.labels)
            spoken = f"{{{labels}}}" if labels else ""
            lines.append(f"{one.name}{sample.suffix}{spoken} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
