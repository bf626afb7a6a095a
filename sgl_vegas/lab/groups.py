"""Lanes, and groups of them that one call serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from sgl_vegas.lab.text import Text
from sgl_vegas.selection.policy import SelectionPolicy


@dataclass
class Lane:
    """One policy drafting along one text, and what was seen of it.

    Attributes:
    accepted: of each iteration, how many of its drafts were accepted.
    read_shares: of each iteration, the KV entries that a draft step reads, for choosing too, as a
        share of all; the mean over its steps.
    covered: of some draft steps, (step, share of attention weight that lay in what was attended
        to), the mean over layers and heads.
    """

    text: Text
    policy: SelectionPolicy
    accepted: list[int] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    covered: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class LaneGroup:
    """Lanes of some texts, as many of each.

    Attributes:
        lanes: their indices, text by text.
        index: (m,) int64, the same.
        texts: the texts' indices; a slice where it can be, since that copies no keys.
        per_text: lanes of each text.
        held: (h,) int64, places in the group of the lanes that attend to a table until the next.
    """

    lanes: list[int]
    index: torch.Tensor
    texts: slice | torch.Tensor
    per_text: int
    held: torch.Tensor

    def by_text(self, of_lanes: torch.Tensor) -> torch.Tensor:
        """(m, ...) to (num_texts, per_text, ...)."""
        return of_lanes.unflatten(0, (-1, self.per_text))


def grouped(
    lanes: Sequence[Lane], key: Callable[[Lane], Hashable], most: int | None = None
) -> list[LaneGroup]:
    """Groups of at most `most` lanes with one `key`; those whose key is None are left out."""
    by_key: dict[Hashable, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index in sorted(range(len(lanes)), key=lambda index: lanes[index].text.index):
        if key(lanes[index]) is not None:
            by_key[key(lanes[index])][lanes[index].text.index].append(index)
    return [
        _group(lanes, texts)
        for of_texts in by_key.values()
        for texts in _alike([*of_texts.values()], most or len(lanes))
    ]


def _alike(of_texts: list[list[int]], most: int) -> list[list[list[int]]]:
    """The lanes of each text cut into runs of texts with as many lanes, at most `most` in all."""
    by_count: dict[int, list[list[int]]] = defaultdict(list)
    for indices in of_texts:
        for start in range(0, len(indices), most):
            part = indices[start : start + most]
            by_count[len(part)].append(part)
    return [
        parts[start : start + most // count]
        for count, parts in by_count.items()
        for start in range(0, len(parts), most // count)
    ]


def _group(lanes: Sequence[Lane], of_texts: list[list[int]]) -> LaneGroup:
    device = lanes[0].text.stack.ids.device
    texts = [lanes[indices[0]].text.index for indices in of_texts]
    run = range(texts[0], texts[0] + len(texts))
    indices = [index for of_text in of_texts for index in of_text]
    held = [place for place, index in enumerate(indices) if not lanes[index].policy.reselects]
    return LaneGroup(
        indices,
        torch.tensor(indices, device=device),
        slice(run.start, run.stop) if texts == [*run] else torch.tensor(texts, device=device),
        len(of_texts[0]),
        torch.tensor(held, dtype=torch.int64, device=device),
    )
