"""Entry point of `sglang.srt.plugins`: registers the algorithm, its flags and hooks."""

from __future__ import annotations


def load() -> None:
    """Register VEGAS with SGLang. Called by SGLang in every process that needs it.

    Raises:
        SystemExit: where SGLang would swallow the error and later report an unknown algorithm.
    """
    try:
        from sgl_vegas.algorithm import NAME, register
        from sgl_vegas.config import add_flags, export_flags
        from sgl_vegas.request_check import check_request
        from sgl_vegas.sglang_compat import (
            hook_cli,
            hook_draft_kv_pool,
            hook_finish_state,
            hook_internal_state,
            hook_request_check,
            hook_row_width,
            is_registered,
        )

        if not is_registered(NAME):
            register()
            hook_cli(add_flags, export_flags)
            hook_draft_kv_pool(NAME)
            hook_finish_state(NAME)
            hook_internal_state(NAME)
            hook_request_check(NAME, check_request)
            hook_row_width(NAME)
    except Exception as error:
        raise SystemExit(f"sgl_vegas can't be loaded: {error}") from error
