"""Fit the basis that the `vegas-refresh` policy codes a model's keys in.

    python -m sgl_vegas.calibrate --model-path M --out basis.safetensors [--prompts FILE_OR_FOLDER]

runs the texts through the model once and keeps what its keys and queries are like, layer by layer
and head by head. A basis goes with a model, not with a kind of text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from sgl_vegas.key_codes.basis import fit_basis
from sgl_vegas.key_codes.moments import Moments
from sgl_vegas.key_codes.texts import calibration_prompts
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.progress import Bar
from sgl_vegas.lab.prompts import Prompts, load_prompts
from sgl_vegas.lab.text import causal_attention

DEFAULT_BITS = 64
# At which each text is read.
PLACES = 4


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        model = LabModel(options.model_path, options.device, getattr(torch, options.dtype))
        if options.prompts is None:
            prompts = calibration_prompts(model.tokenizer)
        else:
            prompts = load_prompts(options.prompts, model.tokenizer)
        basis = fit_basis(collect(model, prompts), options.bits)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    basis.save(options.out)
    print(
        f"wrote {options.out}: {basis.bits_per_key} bits a key and head, "
        f"{basis.share_of_entry:.1%} of a KV entry"
    )


def collect(model: LabModel, prompts: Prompts) -> Moments:
    """Moments of the model's keys and queries along the prompts, each cut to its context.

    A rotary embedding turns keys by their position, so each text is read at several places of the
    model's context: a basis of short texts codes the keys of long ones badly.
    """
    moments = Moments(model.num_layers, model.num_kv_heads, model.head_dim)
    bar = Bar()
    try:
        for index, (_, ids) in enumerate(prompts):
            room = model.context_len - len(ids)
            for place in range(PLACES):
                # Texts share the places out, so that together they leave smaller gaps.
                share = (place + index / len(prompts)) / PLACES
                _add_text(model, ids[: model.context_len], max(round(share * room), 0), moments)
                bar.update("texts", index * PLACES + place + 1, len(prompts) * PLACES)
    finally:
        bar.close()
    return moments


def _add_text(model: LabModel, ids: list[int], start: int, moments: Moments) -> None:
    """Add a text whose first token is at position `start`."""

    def attend(layer, q, k, v, scale) -> torch.Tensor:
        moments.add(layer, q[0], k[0])
        return causal_attention(q, k, v, scale)

    tokens = torch.tensor(ids, device=model.device)
    positions = torch.arange(start, start + len(ids), device=model.device)
    model.forward(tokens[None], positions[None], attend)


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vegas.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="folder or hub name of a Hugging Face model")
    add("--out", type=Path, required=True, help="where to write the basis")
    add("--prompts", type=Path, help="JSONL or a folder of text files; without, texts of Python's")
    add("--bits", type=int, default=DEFAULT_BITS, help="of a key's code, a KV head (default 64)")
    add("--device", default="cuda" if cuda else "cpu")
    add("--dtype", default="bfloat16" if cuda else "float32", choices=("float32", "bfloat16"))
    return parser


if __name__ == "__main__":
    main()
