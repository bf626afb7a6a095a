"""From lanes to rows: means over prompts with their standard errors, and the printed table."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_vegas.lab.groups import Lane


def row(
    policy: str, num_steps: int, ratio: float, temperature: float, lanes: Sequence[Lane]
) -> dict[str, Any]:
    """One cell of the comparison; `lanes` are one a prompt.

    Keys:
        tokens_per_iteration, stderr: mean over prompts and its standard error; every iteration
            makes one token beside the accepted drafts.
        acceptance_by_position: of the drafts at each position whose predecessors were accepted,
            the share that was.
        covered_by_position: mean share of attention weight in what drafts attended to; empty if
            not measured.
        read_share: KV entries that a draft step reads, those for choosing included, as a share of
            all.
        by_prompt: tokens an iteration of each prompt.
    """
    by_prompt = {lane.text.name: 1 + statistics.mean(lane.accepted) for lane in lanes}
    mean, stderr = mean_and_error(list(by_prompt.values()))
    accepted = [count for lane in lanes for count in lane.accepted]
    by_position = []
    for position in range(num_steps):
        reached = sum(count >= position for count in accepted)
        passed = sum(count > position for count in accepted)
        by_position.append(passed / reached if reached else None)
    covered: dict[int, list[float]] = defaultdict(list)
    for lane in lanes:
        for step, share in lane.covered:
            covered[step].append(share)
    return {
        "policy": policy,
        "gamma": num_steps,
        "ratio": ratio,
        "temperature": temperature,
        "prompts": len(lanes),
        "iterations": len(accepted),
        "tokens_per_iteration": mean,
        "stderr": stderr,
        "acceptance_by_position": by_position,
        "covered_by_position": [statistics.mean(covered[step]) for step in sorted(covered)],
        "read_share": statistics.mean(share for lane in lanes for share in lane.read_shares),
        "by_prompt": by_prompt,
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; of one value the error is not known, NaN."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, float]:
    """Mean and standard error of `one` less `other`, prompt by prompt."""
    return mean_and_error([value - other[name] for name, value in one.items()])


def table(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """The rows as text, each beside `baseline`'s of the same gamma, ratio and temperature."""
    lines = [
        f"{'gamma':>5} {'ratio':>5} {'T':>4} {'policy':28} {'tokens/iteration':>16} "
        f"{'less ' + baseline:>16} {'covered':>8} {'KV read':>8}"
    ]
    by_cell = defaultdict(list)
    for entry in rows:
        by_cell[entry["gamma"], entry["ratio"], entry["temperature"]].append(entry)
    for (gamma, ratio, temperature), entries in sorted(by_cell.items()):
        base = next((e for e in entries if e["policy"] == baseline), None)
        for entry in sorted(entries, key=lambda e: -e["tokens_per_iteration"]):
            less = ""
            if base is not None and entry is not base:
                less = "{:+.2f} ± {:.2f}".format(*difference(entry["by_prompt"], base["by_prompt"]))
            covered = entry["covered_by_position"]
            lines.append(
                f"{gamma:5} {ratio:5.2f} {temperature:4.1f} {entry['policy']:28} "
                f"{entry['tokens_per_iteration']:9.2f} ± {entry['stderr']:4.2f} {less:>16} "
                f"{format(statistics.mean(covered), '8.3f') if covered else '':>8} "
                f"{entry['read_share']:8.3f}"
            )
    return "\n".join(lines)
