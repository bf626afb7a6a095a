"""Entry point of `sglang.srt.platforms`: the one call SGLang makes before importing sgl_kernel."""

from __future__ import annotations

import importlib
import logging
import os

import torch

logger = logging.getLogger(__name__)


def activate() -> None:
    """Install the fallback of `sgl_kernel` if this machine needs it.

    SGLang calls this while `sglang.srt.utils` is half imported, so nothing here may import that.

    Returns:
        None always: the choice of the platform stays with SGLang.
    """
    # Unless SGLang is told to serve from the CPU, a broken sgl_kernel is an error that the user has
    # to see: the machine may have a GPU whose driver is missing.
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return
    if torch.cuda.is_available() or _sgl_kernel_works():
        return
    from sgl_vegas.cpu import sgl_kernel_fallback

    sgl_kernel_fallback.install()
    logger.info("sgl_kernel can't be imported here: using sgl_vegas' fallback for CPUs")


def _sgl_kernel_works() -> bool:
    """Whether the installed sgl_kernel, if any, can be imported."""
    try:
        importlib.import_module("sgl_kernel")
    except Exception as error:
        # Not only ImportError: missing drivers surface as OSError or RuntimeError as well.
        logger.debug("import sgl_kernel: %s", error)
        return False
    return True
