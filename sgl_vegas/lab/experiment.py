"""The grid of a comparison: policies × ratios × gammas × temperatures over prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_vegas.config import VegasConfig
from sgl_vegas.lab.groups import Lane
from sgl_vegas.lab.lists import width_of
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.report import row
from sgl_vegas.lab.run import run_lanes
from sgl_vegas.lab.sampling import Sampling
from sgl_vegas.lab.text import Text, write_texts
from sgl_vegas.selection.policy import build_policy

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Grid:
    """Attributes:
    policies: names as of `--vegas-policy`.
    temperatures: 0 for greedy; `top_p` goes with the others.
    iterations: of each prompt in each cell.
    coverage_every: iterations between two that measure coverage, which reads all keys; 0: never.
    batch_bytes: what the lists of lanes that run together may take.
    key_basis: file of the policy that needs one.
    """

    policies: tuple[str, ...]
    ratios: tuple[float, ...]
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...]
    top_p: float = 0.95
    min_tokens: int = 1
    iterations: int = 60
    coverage_every: int = 8
    seed: int = 0
    batch_bytes: float = 2e9
    key_basis: str | None = None

    def __post_init__(self) -> None:
        """Raises:
        ValueError: for a cell that no server could have, before hours are spent on the others.
        """
        if self.iterations < 1:
            raise ValueError(f"--iterations must be at least 1, got {self.iterations}.")
        for gamma, ratio, policy in itertools.product(self.gammas, self.ratios, self.policies):
            build_policy(self.config_of(policy, gamma, ratio))
        if not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise ValueError(f"temperatures must not be negative, got {self.temperatures}.")

    def config_of(self, policy: str, gamma: int, ratio: float) -> VegasConfig:
        return VegasConfig(gamma, ratio, self.min_tokens, policy=policy, key_basis=self.key_basis)

    @property
    def num_new(self) -> int:
        """Tokens of answer that the longest run may need."""
        return self.iterations * (max(self.gammas) + 1) + 1


def run_grid(
    model: LabModel, prompts: list[tuple[str, list[int]]], grid: Grid, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yield a row (see `report.row`) a cell. `prompts` are (name, token ids)."""
    for temperature in grid.temperatures:
        texts = make_texts(model, prompts, grid, temperature, progress)
        for gamma in grid.gammas:
            yield from run_cells(model, texts, grid, temperature, gamma, grid.ratios, progress)


def make_texts(
    model: LabModel,
    prompts: list[tuple[str, list[int]]],
    grid: Grid,
    temperature: float,
    progress: Progress,
) -> list[Text]:
    """Texts long enough for every run of the grid.

    Raises:
        ValueError: naming a prompt that leaves no room for its answer.
    """
    for name, ids in prompts:
        if len(ids) + grid.num_new > model.context_len:
            raise ValueError(
                f"Prompt {name} has {len(ids)} tokens; with {grid.num_new} of answer it goes past "
                f"the model's {model.context_len}. Fewer --iterations need shorter answers."
            )
    return write_texts(
        model, prompts, grid.num_new, _sampling(grid, temperature), grid.seed, progress
    )


def run_cells(
    model: LabModel,
    texts: list[Text],
    grid: Grid,
    temperature: float,
    gamma: int,
    ratios: Sequence[float],
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield a row of each of the grid's policies at each of `ratios`."""
    cells = [
        (policy, ratio, _lanes(texts, grid.config_of(policy, gamma, ratio)))
        for policy in grid.policies
        for ratio in ratios
    ]
    lanes = [lane for _, _, of_cell in cells for lane in of_cell]
    groups = _batches(model, lanes, grid.batch_bytes)
    for index, group in enumerate(groups):
        label = f"T {temperature:g}, gamma {gamma}, batch {index + 1} of {len(groups)}"
        run_lanes(
            model,
            group,
            gamma,
            grid.iterations,
            _sampling(grid, temperature),
            grid.seed,
            grid.coverage_every,
            lambda done, total, label=label: progress(label, done, total),
        )
    for policy, ratio, of_cell in cells:
        yield row(policy, gamma, ratio, temperature, of_cell)


def _sampling(grid: Grid, temperature: float) -> Sampling:
    return Sampling(temperature, grid.top_p if temperature else 1.0)


def _lanes(texts: Sequence[Text], config: VegasConfig) -> list[Lane]:
    # One policy for all of its texts: lanes that share it are asked in one call.
    shared = build_policy(config)
    return [Lane(text, shared) for text in texts]


def _batches(model: LabModel, lanes: list[Lane], batch_bytes: float) -> list[list[Lane]]:
    """Lanes of like width together, since all lists of a batch are as wide as its widest."""
    entry_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    groups: list[list[Lane]] = []
    for lane in sorted(lanes, key=width_of, reverse=True):
        widest = width_of(groups[-1][0]) if groups else math.inf
        if not groups or (len(groups[-1]) + 1) * widest * entry_bytes > batch_bytes:
            groups.append([])
        groups[-1].append(lane)
    return groups
