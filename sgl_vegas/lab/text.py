"""The common text: what the target itself says after a prompt, with what attention needs of it.

Every policy drafts along one text. Greedy decoding would give that text anyway; of sampled texts it
takes away the noise of runs that part, which is larger than what policies differ by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_vegas.attention.torch_reference import verify_attention
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.sampling import Sampling


@dataclass
class Text:
    """Attributes:
    name: of the prompt.
    prompt_len: tokens of the prompt.
    ids: (n,) int64, prompt and answer.
    keys, values: (num_layers, n, num_kv_heads, head_dim), of all tokens but the last.
    logits: (n - prompt_len, vocab), row i the target's logits for the token at prompt_len + i.
    last_queries: (num_layers, num_heads, head_dim), of the prompt's last token.
    coins: (n - prompt_len,) float32 in [0, 1), one an answer's token, the same for every policy.
    scale: factor of the attention logits.
    """

    name: str
    prompt_len: int
    ids: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor
    last_queries: torch.Tensor
    coins: torch.Tensor
    scale: float


def write_texts(
    model: LabModel,
    prompts: list[tuple[str, list[int]]],
    num_new: int,
    sampling: Sampling,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> list[Text]:
    """Let the target answer each prompt, (name, token ids), with `num_new` tokens.

    End-of-text tokens don't end an answer: a long one has more iterations to average over.
    """
    texts = []
    for index, (name, ids) in enumerate(prompts):
        texts.append(_prefilled(model, name, ids, num_new, seed + index))
        progress("prompts", index + 1, len(prompts))
    generator = torch.Generator(model.device).manual_seed(seed)
    for step in range(num_new):
        logits = torch.stack([text.logits[step] for text in texts])
        tokens = sampling.next_tokens(logits, generator)
        for text, token in zip(texts, tokens, strict=True):
            text.ids[text.prompt_len + step] = token
        if step + 1 < num_new:
            _decode(model, texts, tokens, step)
        progress("answers", step + 1, num_new)
    return texts


def _prefilled(model: LabModel, name: str, ids: list[int], num_new: int, seed: int) -> Text:
    prompt_len, device = len(ids), model.device
    total = prompt_len + num_new
    shape = (model.num_layers, total - 1, model.num_kv_heads, model.head_dim)
    keys = torch.zeros(shape, dtype=model.dtype, device=device)
    values = torch.zeros_like(keys)
    all_ids = torch.zeros(total, dtype=torch.int64, device=device)
    all_ids[:prompt_len] = torch.tensor(ids, device=device)
    last_queries: list[torch.Tensor] = []
    scales: set[float] = set()

    def attend(layer, q, k, v, scale) -> torch.Tensor:
        keys[layer, :prompt_len], values[layer, :prompt_len] = k[0], v[0]
        last_queries.append(q[0, -1].clone())  # not all of q kept alive
        scales.add(scale)
        output = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        )
        return output.transpose(1, 2)

    positions = torch.arange(prompt_len, device=device)
    logits = model.forward(all_ids[None, :prompt_len], positions[None], attend)
    answer_logits = logits.new_zeros((num_new, logits.shape[-1]))
    answer_logits[0] = logits[0, -1]
    coins = torch.rand(num_new, generator=torch.Generator().manual_seed(seed)).to(device)
    (scale,) = scales
    return Text(
        name,
        prompt_len,
        all_ids,
        keys,
        values,
        answer_logits,
        torch.stack(last_queries),
        coins,
        scale,
    )


def _decode(model: LabModel, texts: list[Text], tokens: torch.Tensor, step: int) -> None:
    """Process token `step` of every answer: its keys and values, and the next token's logits."""

    def attend(layer, q, k, v, scale) -> torch.Tensor:
        outputs = []
        for i, text in enumerate(texts):
            at = text.prompt_len + step
            text.keys[layer, at], text.values[layer, at] = k[i, 0], v[i, 0]
            keys, values = text.keys[layer, : at + 1], text.values[layer, : at + 1]
            outputs.append(verify_attention(q[i], keys, values, scale))
        return torch.stack(outputs)

    positions = torch.tensor([text.prompt_len + step for text in texts], device=model.device)
    logits = model.forward(tokens[:, None], positions[:, None], attend)
    for text, row in zip(texts, logits, strict=True):
        text.logits[step + 1] = row[-1]
