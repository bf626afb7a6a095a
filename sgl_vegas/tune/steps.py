"""The three steps (paper section 3.4), and how sure each choice is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_vegas.lab.report import difference

# A gain of less is none: it is not worth a larger list.
WORTHLESS_GAIN = 0.01


@dataclass(frozen=True)
class Point:
    """What one setting reached.

    Attributes:
        by_prompt: tokens an iteration or tokens a second of each prompt.
    """

    gamma: int
    ratio: float
    by_prompt: Mapping[str, float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.by_prompt.values())

    @property
    def setting(self) -> str:
        return f"gamma {self.gamma}, ratio {self.ratio:g}"


class Measure(Protocol):
    """Measures settings; points come in the order asked for.

    Attributes:
        how: what the figures are, for the report.
    """

    how: str

    def acceptance(self, gamma: int, ratios: Sequence[float]) -> list[Point]:
        """Tokens an iteration."""
        ...

    def throughput(self, gammas: Sequence[int], ratios: Sequence[float]) -> list[Point]:
        """Tokens a second, of each gamma with each ratio."""
        ...


@dataclass(frozen=True)
class Step:
    """Attributes:
    title, unit: for the report.
    chosen: one of `points`.
    doubt: how sure the choice is.
    """

    title: str
    unit: str
    points: Sequence[Point]
    chosen: Point
    doubt: str


def tune(measure: Measure, gammas: Sequence[int], ratios: Sequence[float]) -> list[Step]:
    """Choose gamma and ratio; the last step's `chosen` is the answer."""
    gammas, ratios = sorted(gammas), sorted(ratios)
    risen = measure.acceptance(gammas[-1], ratios)
    first = Step(
        f"1. ratio at which acceptance stops rising (gamma {gammas[-1]})",
        "tokens an iteration",
        risen,
        *smallest_as_good(risen),
    )
    by_gamma = measure.throughput(gammas, [first.chosen.ratio])
    second = Step(
        f"2. gamma by throughput (ratio {first.chosen.ratio:g})",
        "tokens a second",
        by_gamma,
        *fastest(by_gamma),
    )
    by_ratio = measure.throughput([second.chosen.gamma], ratios)
    third = Step(
        f"3. ratio by throughput (gamma {second.chosen.gamma})",
        "tokens a second",
        by_ratio,
        *fastest(by_ratio),
    )
    return [first, second, third]


def smallest_as_good(points: Sequence[Point]) -> tuple[Point, str]:
    """The smallest ratio than which no larger one is better by more than noise, and than 1%."""
    for point in sorted(points, key=lambda p: p.ratio):
        larger = [p for p in points if p.ratio > point.ratio]
        gains = [(*difference(p.by_prompt, point.by_prompt), p) for p in larger]
        least = WORTHLESS_GAIN * point.mean
        if any(gain > max(least, 2 * error) for gain, error, _ in gains):
            continue
        if not gains:
            return point, "acceptance may rise beyond the largest ratio tried"
        gain, error, p = max(gains, key=lambda g: g[0])
        return point, f"ratio {p.ratio:g} has {gain:+.2f} ± {error:.2f}"
    raise ValueError("no points")


def fastest(points: Sequence[Point]) -> tuple[Point, str]:
    """The point of most tokens a second, and which others it can't be told from."""
    best = max(points, key=lambda p: p.mean)
    near = []
    for point in points:
        lead, error = difference(best.by_prompt, point.by_prompt)
        # An error that isn't known tells nothing apart.
        if point is not best and not lead > 2 * error:
            near.append(point.setting)
    if not near:
        return best, "ahead of all others by more than two standard errors"
    return best, f"not told apart from {'; '.join(near)}"
