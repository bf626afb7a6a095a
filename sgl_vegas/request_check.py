"""What SGLang lets through to where it ends its scheduler: refused (HTTP 400) or mended."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, get_type_hints

import msgspec
import numpy as np
import torch

from sgl_vegas.sglang_compat import PositionalEmbeds

# Fields of SGLang's sampling parameters that it sets itself; a client that sets `is_normalized` is
# spared the rest of its checks.
INTERNAL = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
}
# Beyond any use, and far from where logits overflow in float32.
MAX_LOGIT_BIAS = 1e30


def check_request(manager: Any, request: Any, input_ids: list[int] | None) -> None:
    """Args:
        manager: SGLang's tokenizer manager, which `request` comes through.
        request: for one prompt; its sampling parameters are as the client sent them.

    Raises:
        ValueError: which SGLang answers with status 400.
    """
    _check_prompt(manager.model_config.vocab_size, request, input_ids)
    _check_sampling(manager.sampling_params_class, request.sampling_params)
    request.sampling_params = _without_unknown_stops(
        manager.model_config.vocab_size, request.sampling_params
    )


def _check_prompt(vocab_size: int, request: Any, input_ids: list[int] | None) -> None:
    overrides = request.positional_embed_overrides
    # SGLang takes what JSON made for the objects that `Engine` sends.
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError("positional_embed_overrides can't be sent as JSON.")
    if not input_ids:
        # A text may have no tokens; ids are counted by SGLang, unless they come in a batch.
        if request.input_embeds is None:
            raise ValueError("The prompt has no tokens.")
        return
    # SGLang has a check for the upper end but calls it nowhere: the embedding fails.
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"input_ids contains {token}, which is not in the vocabulary of {vocab_size} "
                "tokens."
            )


def _check_sampling(params_class: type, sampling: Any) -> None:
    """Types are declared and never looked at: a constraint, say, may be a list."""
    if not isinstance(sampling, dict):
        raise ValueError("sampling_params must be an object.")
    types = _types(params_class)
    for name, value in sampling.items():
        if name not in types:
            raise ValueError(f"sampling_params has no {name!r}.")
        if value is None:  # the default
            continue
        if name == "logit_bias":
            value = _checked_biases(value)
        elif name == "stop_token_ids" and isinstance(value, (list, tuple, set)):
            value = _token_ids(value)
        elif name == "custom_params" and isinstance(value, dict):  # the client's own
            continue
        value = _plain(value)
        # Numbers may stand for each other, texts may not stand for numbers.
        is_number = isinstance(value, (int, float))
        try:
            msgspec.convert(value, types[name], strict=not is_number)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params, {name}: {error}") from error


def _without_unknown_stops(vocab_size: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Tokens that can't be emitted stop nothing, but `min_new_tokens` of any request in the batch
    has SGLang look them up."""
    stops = sampling.get("stop_token_ids")
    if stops is None:
        return sampling
    known = [token for token in _token_ids(stops) if 0 <= token < vocab_size]
    return {**sampling, "stop_token_ids": known}


def _token_ids(values: Iterable[Any]) -> list[Any]:
    """As ints where they are numbers: a 5.0 stops at token 5 in SGLang too. None is left out."""
    plain = [_plain(value) for value in values if value is not None]
    return [
        int(value) if isinstance(value, float) and value.is_integer() else value for value in plain
    ]


def _plain(value: Any) -> Any:
    """A number as Python's own, truths as 0 and 1; anything else as it is."""
    if isinstance(value, (np.generic, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    return int(value) if isinstance(value, bool) else value


@lru_cache
def _types(params_class: type) -> dict[str, Any]:
    hints = get_type_hints(params_class)
    return {name: hint for name, hint in hints.items() if name not in INTERNAL}


def _checked_biases(biases: Any) -> Any:
    if not isinstance(biases, dict):
        return biases
    biases = {str(token): _plain(value) for token, value in biases.items()}  # `Engine` takes ids
    for value in biases.values():
        # Not true of a NaN either.
        if isinstance(value, (int, float)) and not abs(value) <= MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias of {value} is not within {MAX_LOGIT_BIAS:g} of 0.")
    return biases
