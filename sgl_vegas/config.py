"""VegasConfig: the settings of one server, validated before anything is loaded.

Each setting has an environment variable, which is the source of truth (it survives the spawn of
SGLang's processes and works with `sglang.Engine`), and a command-line flag, which only writes that
variable. The draft length gamma is SGLang's own `--speculative-num-steps`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

SCORE_MODES = ("weight", "logit")
FIRST_TABLES = ("cached", "prompt", "none")
DEFAULT_NUM_STEPS = 6


def _optional_int(text: str) -> int | None:
    return None if text.lower() in ("", "none") else int(text)


def _optional_float(text: str) -> float | None:
    return None if text.lower() in ("", "none") else float(text)


def _optional_path(text: str) -> str | None:
    return None if text.lower() in ("", "none") else text


def _setting(default: Any, parse: Callable[[str], Any], help: str, choices=None) -> Any:
    return dataclasses.field(
        default=default, metadata={"parse": parse, "help": help, "choices": choices}
    )


@dataclasses.dataclass(frozen=True)
class VegasConfig:
    """Settings of VEGAS (paper section 3; defaults from the paper's evaluation).

    Raises:
        ValueError: naming the flag, for a value out of range.
    """

    num_steps: int = DEFAULT_NUM_STEPS
    sparsity_ratio: float = _setting(
        0.07, float, "Share of a request's KV entries that its drafts attend to, in (0, 1]."
    )
    min_tokens: int = _setting(
        256, int, "Smallest number of selected KV entries; shorter contexts draft densely."
    )
    max_tokens: int | None = _setting(
        None, _optional_int, "Largest number of selected KV entries; 'none' for no limit."
    )
    policy: str = _setting(
        "vegas",
        str,
        "What drafts attend to: 'vegas' (two verify queries), 'streaming' (sinks and window), "
        "'quest' (page bounds, at every draft step), 'last-accepted', 'all-queries' (verify "
        "queries), 'vegas-refresh' (vegas, ranked again at every draft step; needs "
        "--vegas-key-basis), 'oracle' (exact, for research), 'dense' (everything), or "
        "'package.module:Class' for a policy of your own.",
    )
    score_mode: str = _setting(
        "weight",
        str,
        "What the vegas policy ranks by: mean softmax weight, or mean raw logit.",
        SCORE_MODES,
    )
    speculate_above: int | None = _setting(
        None,
        _optional_int,
        "KV tokens of a batch, all requests together, from which it drafts; smaller batches decode "
        "plainly. 0 always drafts; 'none' decides by step times measured at start and by the "
        "acceptance seen.",
    )

    first_table: str = _setting(
        "cached",
        str,
        "What a request's drafts attend to before its first verify pass: 'cached' (the table kept "
        "with its cached prefix, where that reaches nearly to the prompt's end, else as 'prompt'), "
        "'prompt' (what the prompt's last query attends to) or 'none' (everything).",
        FIRST_TABLES,
    )
    table_cache_gb: float | None = _setting(
        None,
        _optional_float,
        "Memory for tables of cached prefixes, in GB; 'none' for 1% of the memory that is free for "
        "the KV pool, 0 to keep none.",
    )

    key_basis: str | None = _setting(
        None,
        _optional_path,
        "What the vegas-refresh policy codes keys in: a file that `python -m sgl_vegas.calibrate` "
        "wrote for this model; 'none' for none.",
    )

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"--speculative-num-steps must be at least 1, got {self.num_steps}.")
        if not 0 < self.sparsity_ratio <= 1:
            raise ValueError(
                f"--vegas-sparsity-ratio must be in (0, 1], got {self.sparsity_ratio}."
            )
        if self.min_tokens < 1:
            raise ValueError(f"--vegas-min-tokens must be at least 1, got {self.min_tokens}.")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"--vegas-max-tokens ({self.max_tokens}) must not be below "
                f"--vegas-min-tokens ({self.min_tokens})."
            )
        if self.speculate_above is not None and self.speculate_above < 0:
            raise ValueError(
                f"--vegas-speculate-above must be at least 0, got {self.speculate_above}."
            )
        if self.score_mode not in SCORE_MODES:
            raise ValueError(
                f"--vegas-score-mode must be one of {SCORE_MODES}, got {self.score_mode!r}."
            )

        if self.first_table not in FIRST_TABLES:
            raise ValueError(
                f"--vegas-first-table must be one of {FIRST_TABLES}, got {self.first_table!r}."
            )
        if self.table_cache_gb is not None and not 0 <= self.table_cache_gb < math.inf:
            raise ValueError(
                f"--vegas-table-cache-gb must be at least 0, got {self.table_cache_gb}."
            )

    @property
    def reuses_tables(self) -> bool:
        """Whether tables are kept with cached prefixes."""
        return self.first_table == "cached" and self.table_cache_gb != 0

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of one verify pass: the last committed token and gamma drafts."""
        return self.num_steps + 1

    @property
    def selects_in_kernels(self) -> bool:
        """Whether the CUDA kernels make the tables; otherwise a policy's Python code does."""
        ranked = self.policy in ("vegas", "vegas-refresh") and self.score_mode == "weight"
        return ranked or self.policy == "dense"

    def budget(self, seq_len: int) -> int:
        """Number of positions to select from a context of `seq_len` tokens (paper section 3.2)."""
        wanted = max(math.ceil(self.sparsity_ratio * seq_len), self.min_tokens)
        if self.max_tokens is not None:
            wanted = min(wanted, self.max_tokens)
        return min(wanted, seq_len)

    @classmethod
    def from_env(
        cls, num_steps: int | None = None, environ: Mapping[str, str] = os.environ
    ) -> VegasConfig:
        """Read the settings of `environ`; `num_steps` None means the default gamma."""
        values: dict[str, Any] = {} if num_steps is None else {"num_steps": num_steps}
        for field in _settings():
            text = environ.get(env_name(field.name))
            if text is None:
                continue
            try:
                values[field.name] = field.metadata["parse"](text)
            except ValueError as error:
                raise ValueError(
                    f"{flag_name(field.name)} ({env_name(field.name)}): "
                    f"{text!r} is not a valid value."
                ) from error
        return cls(**values)

    def describe(self) -> str:
        """One line that states what is in force, in SGLang's `key=value` log style."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))


def _settings() -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(VegasConfig) if field.metadata]


def env_name(setting: str) -> str:
    return f"SGLANG_VEGAS_{setting.upper()}"


def flag_name(setting: str) -> str:
    return f"--vegas-{setting.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--vegas-*` flags, in a group of their own."""
    group = parser.add_argument_group("VEGAS speculative decoding (--speculative-algorithm VEGAS)")
    for field in _settings():
        group.add_argument(
            flag_name(field.name),
            type=str,
            choices=field.metadata["choices"],
            default=None,
            # argparse reads % in a help text as a format.
            help=f"{field.metadata['help']} Default: {field.default}. "
            f"Environment: {env_name(field.name)}.".replace("%", "%%"),
        )


def export_flags(args: argparse.Namespace) -> None:
    """Write the flags that were given to the environment, for this process and its children."""
    for field in _settings():
        value = getattr(args, f"vegas_{field.name}", None)
        if value is not None:
            os.environ[env_name(field.name)] = value
