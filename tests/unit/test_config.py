"""VegasConfig: defaults, refusals by flag name, environment, command line, and the budget."""

from __future__ import annotations

import argparse
import os
from fractions import Fraction

import pytest

from sgl_vegas.config import VegasConfig, add_flags, env_name, export_flags, flag_name

SETTINGS = (
    *("sparsity_ratio", "min_tokens", "max_tokens", "policy", "score_mode"),
    *("speculate_above", "first_table", "table_cache_gb", "key_basis"),
)
FLAGS = tuple(f"--vegas-{name.replace('_', '-')}" for name in SETTINGS)


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting comes from outside, and none that a test exports survives it."""
    for name in SETTINGS:
        # setenv first: monkeypatch then removes what the test writes, also if nothing was there.
        monkeypatch.setenv(f"SGLANG_VEGAS_{name.upper()}", "x")
        monkeypatch.delenv(f"SGLANG_VEGAS_{name.upper()}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    add_flags(result)
    return result


def test_defaults_are_the_papers() -> None:
    config = VegasConfig.from_env(environ={})
    assert (config.num_steps, config.num_draft_tokens) == (6, 7)
    assert (config.sparsity_ratio, config.min_tokens, config.max_tokens) == (0.07, 256, None)
    assert (config.policy, config.score_mode) == ("vegas", "weight")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"num_steps": 0}, "--speculative-num-steps"),
        ({"num_steps": -3}, "--speculative-num-steps"),
        ({"sparsity_ratio": 0.0}, "--vegas-sparsity-ratio"),
        ({"sparsity_ratio": -0.1}, "--vegas-sparsity-ratio"),
        ({"sparsity_ratio": 1.0001}, "--vegas-sparsity-ratio"),
        ({"sparsity_ratio": float("nan")}, "--vegas-sparsity-ratio"),
        ({"min_tokens": 0}, "--vegas-min-tokens"),
        ({"min_tokens": 300, "max_tokens": 299}, "--vegas-max-tokens"),
        ({"max_tokens": 0}, "--vegas-max-tokens"),
        ({"score_mode": "logits"}, "--vegas-score-mode"),
        ({"first_table": "last"}, "--vegas-first-table"),
        ({"table_cache_gb": -0.5}, "--vegas-table-cache-gb"),
        ({"table_cache_gb": float("nan")}, "--vegas-table-cache-gb"),
        ({"table_cache_gb": float("inf")}, "--vegas-table-cache-gb"),
    ],
)
def test_refusals_name_their_flag(values: dict, flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        VegasConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"num_steps": 1},
        {"sparsity_ratio": 1.0},
        {"sparsity_ratio": 1e-9},
        {"min_tokens": 1},
        {"min_tokens": 300, "max_tokens": 300},
        {"score_mode": "logit"},
    ],
)
def test_the_edges_of_every_range_are_allowed(values: dict) -> None:
    config = VegasConfig(**values)
    assert all(getattr(config, name) == value for name, value in values.items())


def test_every_setting_is_read_from_its_variable() -> None:
    environ = {
        "SGLANG_VEGAS_SPARSITY_RATIO": "0.15",
        "SGLANG_VEGAS_MIN_TOKENS": "32",
        "SGLANG_VEGAS_MAX_TOKENS": "4096",
        "SGLANG_VEGAS_POLICY": "streaming",
        "SGLANG_VEGAS_SCORE_MODE": "logit",
        "SGLANG_VEGAS_NUM_STEPS": "99",  # no such setting: gamma is SGLang's own flag
    }
    assert VegasConfig.from_env(num_steps=4, environ=environ) == VegasConfig(
        num_steps=4,
        sparsity_ratio=0.15,
        min_tokens=32,
        max_tokens=4096,
        policy="streaming",
        score_mode="logit",
    )
    assert VegasConfig.from_env(environ=environ).num_steps == 6


@pytest.mark.parametrize("text", ["none", "None", "NONE", ""])
def test_no_limit_can_be_spelled(text: str) -> None:
    assert VegasConfig.from_env(environ={"SGLANG_VEGAS_MAX_TOKENS": text}).max_tokens is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sparsity_ratio", "7%"),
        ("sparsity_ratio", "2"),
        ("min_tokens", "1.5"),
        ("min_tokens", "many"),
        ("max_tokens", "unlimited"),
        ("score_mode", "both"),
    ],
)
def test_bad_variables_are_refused_by_flag(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"--vegas-{name.replace('_', '-')}"):
        VegasConfig.from_env(environ={f"SGLANG_VEGAS_{name.upper()}": text})


def test_unparsable_variables_are_named_too() -> None:
    with pytest.raises(ValueError, match=r"SGLANG_VEGAS_MIN_TOKENS.*'many'"):
        VegasConfig.from_env(environ={"SGLANG_VEGAS_MIN_TOKENS": "many"})


@pytest.mark.usefixtures("clean_env")
def test_given_flags_go_to_the_environment_and_others_do_not() -> None:
    args = parser().parse_args(["--vegas-sparsity-ratio", "0.2", "--vegas-policy", "dense"])
    export_flags(args)
    assert os.environ["SGLANG_VEGAS_SPARSITY_RATIO"] == "0.2"
    assert os.environ["SGLANG_VEGAS_POLICY"] == "dense"
    assert not {"SGLANG_VEGAS_MIN_TOKENS", "SGLANG_VEGAS_MAX_TOKENS"} & set(os.environ)
    assert VegasConfig.from_env() == VegasConfig(sparsity_ratio=0.2, policy="dense")


@pytest.mark.usefixtures("clean_env")
def test_every_flag_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_VEGAS_MIN_TOKENS", "7")  # a flag wins over the environment
    values = ("0.5", "16", "none", "package.module:Class", "logit", "100", "prompt", "0.25", "k")
    line = [text for pair in zip(FLAGS, values, strict=True) for text in pair]
    export_flags(parser().parse_args(line))
    assert VegasConfig.from_env(num_steps=3) == VegasConfig(
        3, 0.5, 16, None, "package.module:Class", "logit", 100, "prompt", 0.25, "k"
    )


@pytest.mark.usefixtures("clean_env")
def test_a_namespace_without_our_flags_exports_nothing() -> None:
    before = dict(os.environ)
    export_flags(argparse.Namespace(port=30000))
    assert dict(os.environ) == before


def test_help_tells_each_flags_default_and_variable() -> None:
    text = " ".join(parser().format_help().split())
    assert "--speculative-algorithm VEGAS" in text
    defaults = ("0.07", "256", "None", "vegas", "weight", "None", "cached", "None", "None")
    for name, flag, default in zip(SETTINGS, FLAGS, defaults, strict=True):
        assert flag_name(name) == flag
        assert flag in text
        assert env_name(name) == f"SGLANG_VEGAS_{name.upper()}"
        assert f"Default: {default}. Environment: {env_name(name)}." in text
    assert "{weight,logit}" in text
    assert "1% of the memory" in text


def test_unknown_choices_are_refused_on_the_command_line() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--vegas-score-mode", "both"])


@pytest.mark.parametrize("ratio", [0.03, 0.07, 0.15, 0.5, 1.0])
@pytest.mark.parametrize(("low", "high"), [(1, None), (256, None), (64, 200), (5, 5)])
def test_budget_is_the_clamped_share(ratio: float, low: int, high: int | None) -> None:
    config = VegasConfig(sparsity_ratio=ratio, min_tokens=low, max_tokens=high)
    for seq_len in [*range(300), 3_999, 4_000, 100_000, 131_072]:
        exact = Fraction(ratio) * seq_len
        share = exact.numerator // exact.denominator + (exact.denominator != 1)
        wanted = max(low, share) if high is None else min(max(low, share), high)
        # Where the exact product is a hair off an integer, double arithmetic may round to it.
        slack = abs(exact - round(exact)) < Fraction(1, 10**9)
        got = config.budget(seq_len)
        assert got <= seq_len
        assert abs(got - min(wanted, seq_len)) <= slack


def test_description_states_every_value() -> None:
    text = VegasConfig(num_steps=5, sparsity_ratio=0.11, min_tokens=77, max_tokens=888).describe()
    for part in ("num_steps=5", "sparsity_ratio=0.11", "min_tokens=77", "max_tokens=888"):
        assert part in text
    assert "policy=vegas" in text
    assert "score_mode=weight" in text
