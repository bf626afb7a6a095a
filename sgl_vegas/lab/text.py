"""The common text: what the target itself says after a prompt, with what attention needs of it.

Every policy drafts along one text. Greedy decoding would give that text anyway; of sampled texts it
takes away the noise of runs that part, which is larger than what policies differ by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.sampling import Sampling

PROGRESS_EVERY = 16


@dataclass(frozen=True)
class TextStack:
    """Texts side by side, padded with zeros to the longest, so that one operation serves all.

    Attributes:
        prompt_lens: (num_texts,) int64, tokens of each prompt.
        ids: (num_texts, n) int64, prompts and answers.
        keys, values: (num_layers, num_texts, n - 1, num_kv_heads, head_dim).
        logits: (num_texts, num_new, vocab), row i the target's logits for the answer's token i.
        coins: (num_texts, num_new) float32 in [0, 1).
    """

    prompt_lens: torch.Tensor
    ids: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor
    coins: torch.Tensor


@dataclass(frozen=True)
class Text:
    """One text of a stack; its tensors are views of the stack's.

    Attributes:
        name: of the prompt.
        prompt_len: tokens of the prompt.
        stack, index: where it lies.
        last_queries: (num_layers, num_heads, head_dim), of the prompt's last token.
        scale: factor of the attention logits.
    """

    name: str
    prompt_len: int
    stack: TextStack
    index: int
    last_queries: torch.Tensor
    scale: float

    def __len__(self) -> int:
        return self.prompt_len + self.stack.logits.shape[1]

    @property
    def ids(self) -> torch.Tensor:
        """(n,) int64, prompt and answer."""
        return self.stack.ids[self.index, : len(self)]

    @property
    def keys(self) -> torch.Tensor:
        """(num_layers, n - 1, num_kv_heads, head_dim), of all tokens but the last."""
        return self.stack.keys[:, self.index, : len(self) - 1]

    @property
    def values(self) -> torch.Tensor:
        """As `keys`."""
        return self.stack.values[:, self.index, : len(self) - 1]

    @property
    def logits(self) -> torch.Tensor:
        """(n - prompt_len, vocab), row i the target's logits for the token at prompt_len + i."""
        return self.stack.logits[self.index]

    @property
    def coins(self) -> torch.Tensor:
        """(n - prompt_len,) float32 in [0, 1), one an answer's token, the same for every policy."""
        return self.stack.coins[self.index]


@torch.inference_mode()
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
    lens = [len(ids) for _, ids in prompts]
    longest = max(lens) + num_new
    shape = (model.num_layers, len(prompts), longest - 1, model.num_kv_heads, model.head_dim)
    keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
    values = torch.zeros_like(keys)
    ids = torch.stack([pad(torch.tensor(own), (0, longest - len(own))) for _, own in prompts])
    ids = ids.to(model.device)
    prefills = []
    for index, prompt_len in enumerate(lens):
        prompt = ids[index, :prompt_len]
        prefills.append(_prefill(model, prompt, keys[:, index], values[:, index]))
        progress("prompts", index + 1, len(prompts))
    logits = torch.stack([pad(prefill[0][None], (0, 0, 0, num_new - 1)) for prefill in prefills])
    coins = torch.stack([_coins(num_new, seed + index) for index in range(len(prompts))])
    stack = TextStack(
        torch.tensor(lens, device=model.device), ids, keys, values, logits, coins.to(model.device)
    )
    _write_answers(model, stack, max(lens), sampling, seed, progress)
    return [
        Text(name, len(own), stack, index, last_queries, scale)
        for index, ((name, own), (_, last_queries, scale)) in enumerate(
            zip(prompts, prefills, strict=True)
        )
    ]


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of whole texts, as an `Attend` of the model gets them, and shaped like `q`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


def one_query_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one query each of a batch.

    Args:
        q: (batch_size, num_heads, head_dim).
        keys, values: (batch_size, num_kv_heads, n, head_dim).
        mask: (batch_size, num_kv_heads or 1, n) bool, which entries count.

    Returns:
        (batch_size, num_heads, head_dim).
    """
    # The heads that share a KV head stand as its queries: `enable_gqa` with a mask would copy the
    # keys for each of them.
    grouped = q.unflatten(1, (keys.shape[1], -1))
    output = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask.unsqueeze(2), scale=scale
    )
    return output.flatten(1, 2)


def text_scores(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Scaled logits of a few queries of each text over its keys.

    Args:
        q: (num_texts, num_queries, num_heads, head_dim).
        keys: (num_texts, n, num_kv_heads, head_dim).
        visible: (num_texts, num_queries) int64, how many of the keys each query sees.

    Returns:
        (num_texts, num_queries, num_heads, n) float32 (float64 if q is), `-inf` where masked.
    """
    num_queries, num_kv_heads = q.shape[1], keys.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    # (texts, kv_heads, queries * group, head_dim) x (texts, kv_heads, head_dim, n)
    by_head = q.to(dtype).unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)
    scores = by_head @ keys.to(dtype).permute(0, 2, 3, 1) * scale
    scores = scores.unflatten(2, (num_queries, -1)).transpose(1, 2).flatten(2, 3)
    hidden = torch.arange(keys.shape[1], device=keys.device) >= visible[..., None, None]
    return scores.masked_fill_(hidden, float("-inf"))


def attend_along(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of several requests' drafts, each behind a beginning of a text, m of each text.

    Args:
        q: (num_texts, m, width, num_heads, head_dim), the drafts' queries, causal among themselves.
        k, v: (num_texts, m, width, num_kv_heads, head_dim), the drafts' own.
        keys, values: (num_texts, n, num_kv_heads, head_dim), the texts', n at least any
            start + width; what lies behind a text is finite.
        starts: (num_texts, m) int64, how much of its text each request sees; its drafts stand
            there.

    Returns:
        (num_texts, m, width, num_heads, head_dim), and the scaled logits, (num_texts, m, width,
        num_heads, n) float32 (float64 if q is), a draft's at its position, `-inf` where a query may
        not look.
    """
    _, m, width, num_heads, _ = q.shape
    num_kv_heads = k.shape[3]
    visible = starts[..., None].expand(-1, -1, width).flatten(1)
    scores = text_scores(q.flatten(1, 2), keys, visible, scale).unflatten(1, (m, width))
    # (texts, m, kv_heads, group, width, head_dim) x (texts, m, kv_heads, 1, head_dim, width)
    grouped = q.to(scores.dtype).unflatten(3, (num_kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)
    own = grouped @ k.to(scores.dtype).permute(0, 1, 3, 4, 2).unsqueeze(3) * scale
    places = torch.arange(width, device=q.device)
    own = own.masked_fill_(places > places[:, None], float("-inf"))
    columns = (starts[..., None] + places)[:, :, None, None].expand(-1, -1, width, num_heads, -1)
    scores.scatter_(4, columns, own.permute(0, 1, 4, 2, 3, 5).flatten(3, 4))

    weights = scores.softmax(dim=-1).to(v.dtype)
    of_own = weights.gather(4, columns).unflatten(3, (num_kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)
    # The text goes on otherwise where the drafts stand.
    weights.scatter_(4, columns, 0.0)
    by_head = weights.unflatten(3, (num_kv_heads, -1)).permute(0, 3, 1, 2, 4, 5).flatten(2, 4)
    output = (by_head @ values.transpose(1, 2)).unflatten(2, (m, width, -1))
    output = output.permute(0, 2, 3, 1, 4, 5)
    output = output + (of_own @ v.transpose(2, 3).unsqueeze(3)).permute(0, 1, 4, 2, 3, 5)
    return output.flatten(3, 4), scores


def _prefill(
    model: LabModel, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Process one prompt, (n,) int64, and write its part of `keys` and `values`, (num_layers,
    at least n, num_kv_heads, head_dim).

    Returns:
        (vocab,) logits of the next token, the last token's queries (num_layers, num_heads,
        head_dim), and the logits' scale.
    """
    prompt_len = len(ids)
    last_queries: list[torch.Tensor] = []
    scales: set[float] = set()

    def attend(layer, q, k, v, scale) -> torch.Tensor:
        keys[layer, :prompt_len], values[layer, :prompt_len] = k[0], v[0]
        last_queries.append(q[0, -1].clone())  # not all of q kept alive
        scales.add(scale)
        return causal_attention(q, k, v, scale)

    positions = torch.arange(prompt_len, device=ids.device)
    logits = model.forward(ids[None], positions[None], attend)
    (scale,) = scales
    return logits[0, -1], torch.stack(last_queries), scale


def _coins(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def _write_answers(
    model: LabModel,
    stack: TextStack,
    longest_prompt: int,
    sampling: Sampling,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> None:
    generator = torch.Generator(model.device).manual_seed(seed)
    num_new = stack.logits.shape[1]
    every = torch.arange(len(stack.ids), device=model.device)
    for step in range(num_new):
        tokens = sampling.next_tokens(stack.logits[:, step], generator)
        stack.ids[every, stack.prompt_lens + step] = tokens
        if step + 1 < num_new:
            _decode(model, stack, tokens, step, longest_prompt + step + 1)
        if (step + 1) % PROGRESS_EVERY == 0 or step + 1 == num_new:
            progress("answers", step + 1, num_new)


def _decode(model: LabModel, stack: TextStack, tokens: torch.Tensor, step: int, end: int) -> None:
    """Process token `step` of every answer, (num_texts,): its keys and values, and the next token's
    logits. `end`: tokens of the longest text with it, kept on the host to spare a sync."""
    at = stack.prompt_lens + step
    every = torch.arange(len(at), device=at.device)
    seen = torch.arange(end, device=at.device) <= at[:, None]

    def attend(layer, q, k, v, scale) -> torch.Tensor:
        keys, values = stack.keys[layer], stack.values[layer]
        keys[every, at], values[every, at] = k[:, 0], v[:, 0]
        seen_keys, seen_values = (x[:, :end].transpose(1, 2) for x in (keys, values))
        return one_query_attention(q[:, 0], seen_keys, seen_values, seen[:, None], scale)[:, None]

    logits = model.forward(tokens[:, None], at[:, None], attend)
    stack.logits[:, step + 1] = logits[:, -1]
