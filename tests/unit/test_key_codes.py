"""Key codes against what they are for: logits, and which entries have the largest."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from sgl_vegas.calibrate.__main__ import collect
from sgl_vegas.config import VegasConfig
from sgl_vegas.key_codes.basis import ERRORS, STEPS, KeyBasis, fit_basis, load_basis
from sgl_vegas.key_codes.moments import Moments
from sgl_vegas.lab.model import LabModel
from sgl_vegas.selection.policy import build_policy
from sgl_vegas.selection.refresh import RefreshPolicy
from tests.tiny_model import CONTEXT_LEN, VOCAB_SIZE, make_tiny_model

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 16, 2
SCALE = DIM**-0.5


def keys_and_queries(seed: int, n: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, KV_HEADS, DIM) and (n, HEADS, DIM): keys vary most where queries hardly look."""
    generator = torch.Generator().manual_seed(seed)
    # The same directions for every seed, as of one model.
    turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(7))).Q
    spread = torch.logspace(1, -1, DIM)
    keys = (torch.randn(n, KV_HEADS, DIM, generator=generator) * spread) @ turn + 3.0
    queries = (torch.randn(n, HEADS, DIM, generator=generator) * spread.flip(0)) @ turn
    return keys, queries


def fitted(bits: int, seed: int = 0) -> KeyBasis:
    moments = Moments(LAYERS, KV_HEADS, DIM)
    for layer in range(LAYERS):
        keys, queries = keys_and_queries(seed + layer)
        for part in range(0, 600, 200):
            moments.add(layer, queries[part : part + 200], keys[part : part + 200])
    return fit_basis(moments, bits)


def logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(heads, n_q, n_k) float64, each query's mean over the keys taken off."""
    group = queries.shape[1] // keys.shape[1]
    of_heads = keys.double().repeat_interleave(group, dim=1)
    found = torch.einsum("ihd,jhd->hij", queries.double(), of_heads)
    return found - found.mean(dim=-1, keepdim=True)


def coded_logits(basis: KeyBasis, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    projected = basis.project(0, queries.unflatten(1, (KV_HEADS, -1)))
    found = torch.einsum("ihgd,jhd->hgij", projected, basis.components(0, keys)).flatten(0, 1)
    return found - found.mean(dim=-1, keepdim=True)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean() / wanted.square().mean())


def test_errors_are_those_of_the_steps() -> None:
    """The table's quantisers on many Gaussian numbers."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bits in range(1, 9):
        half = 2 ** (bits - 1)
        coded = ((x / STEPS[bits]).floor().clamp(-half, half - 1) + 0.5) * STEPS[bits]
        assert (x - coded).square().mean() == pytest.approx(ERRORS[bits], rel=0.06)


@pytest.mark.parametrize("bits_a_dim", [1, 2, 3, 4])
def test_codes_keep_logits_of_other_texts(bits_a_dim: int) -> None:
    """These keys and queries make all components count alike, whose errors are the quantiser's."""
    bits = bits_a_dim * DIM
    basis = fitted(bits)
    assert basis.bits_per_key == bits
    assert basis.bits.sum(dim=-1).eq(bits).all()
    keys, queries = keys_and_queries(seed=50)
    found = error(coded_logits(basis, queries, keys), logits(queries, keys))
    assert found == pytest.approx(ERRORS[bits_a_dim], rel=0.2)


def test_fewer_errors_than_uniform_codes_of_the_keys() -> None:
    basis = fitted(2 * DIM)
    keys, queries = keys_and_queries(seed=50)
    mean, spread = keys.mean(dim=0), keys.std(dim=0)
    step = STEPS[2] * spread
    uniform = (((keys - mean) / step).floor().clamp(-2, 1) + 0.5) * step + mean
    wanted = logits(queries, keys)
    ours = error(coded_logits(basis, queries, keys), wanted)
    assert ours < 0.3 * error(logits(queries, uniform), wanted)


def test_bits_go_where_queries_look() -> None:
    """Of two independent components, one that no query reads and one that all do."""
    moments = Moments(1, 1, 2)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1000, 1, 2, generator=generator) * torch.tensor([100.0, 1.0])
    queries = torch.tensor([0.001, 1.0]).expand(50, 1, 2)
    moments.add(0, queries, keys)
    basis = fit_basis(moments, 6)
    counted = basis.encode[0, 0][1].abs() > basis.encode[0, 0][0].abs()
    assert basis.bits[0, 0][counted].sum() >= 4


def test_a_basis_survives_its_file(tmp_path: Path) -> None:
    basis = fitted(24)
    basis.save(tmp_path / "basis.safetensors")
    loaded = load_basis(tmp_path / "basis.safetensors")
    keys, _ = keys_and_queries(seed=3)
    assert torch.equal(loaded.components(1, keys), basis.components(1, keys))
    assert loaded.share_of_entry == 24 / (32 * DIM)


def test_calibration_reads_texts_over_the_whole_context(tmp_path: Path) -> None:
    """Against the keys of the tiny model's own forward passes, at positions as they should be."""
    reference = make_tiny_model(tmp_path)
    lengths = (50, 90)
    prompts = [
        (str(n), torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)))
        for n in lengths
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_vegas.lab.model.AutoTokenizer.from_pretrained", lambda path: None)
        model = LabModel(tmp_path, "cpu", torch.float64)
    moments = collect(model, [(name, ids.tolist()) for name, ids in prompts])

    # Text i of n at place j of 4 has the share (j + i / n) / 4 of the context in front of it.
    expected = Moments(model.num_layers, model.num_kv_heads, model.head_dim)
    for i, (_, ids) in enumerate(prompts):
        for place in range(4):
            start = round((place + i / 2) / 4 * (CONTEXT_LEN - len(ids)))
            cache = DynamicCache()
            with torch.no_grad():
                reference(
                    ids[None],
                    position_ids=torch.arange(start, start + len(ids))[None],
                    past_key_values=cache,
                )
            for layer in range(model.num_layers):
                layer_keys = cache.layers[layer].keys  # pyright: ignore[reportAttributeAccessIssue]
                assert layer_keys is not None
                keys = layer_keys[0].transpose(0, 1)
                expected.add(layer, torch.zeros(1, 4, model.head_dim), keys)
    assert moments.num_keys == expected.num_keys == [4 * sum(lengths)] * model.num_layers
    torch.testing.assert_close(moments.key_sum, expected.key_sum, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(moments.key_square, expected.key_square, rtol=1e-4, atol=1e-1)
    assert moments.num_queries == [count * 2 for count in moments.num_keys]  # 4 heads on 2


def test_refused() -> None:
    with pytest.raises(ValueError, match="keys and queries of every layer"):
        fit_basis(Moments(1, 1, 4), 8)
    with pytest.raises(ValueError, match=r"\[1, 128\], got 129"):
        moments = Moments(1, KV_HEADS, DIM)
        moments.add(0, *reversed(keys_and_queries(0)))
        fit_basis(moments, 129)


def test_no_basis(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --vegas-key-basis"):
        build_policy(VegasConfig(policy="vegas-refresh"))
    (tmp_path / "other").write_text("no basis")
    for name in ("other", "missing"):
        with pytest.raises(ValueError, match=f"{name} is no key basis"):
            build_policy(VegasConfig(policy="vegas-refresh", key_basis=str(tmp_path / name)))


@pytest.fixture
def policy(tmp_path: Path) -> RefreshPolicy:
    fitted(4 * DIM).save(tmp_path / "basis.safetensors")
    config = VegasConfig(
        min_tokens=40,
        policy="vegas-refresh",
        key_basis=str(tmp_path / "basis.safetensors"),
    )
    policy = build_policy(config)
    assert isinstance(policy, RefreshPolicy)
    return policy


def test_reads_are_within_the_budget(policy: RefreshPolicy) -> None:
    for seq_len in (200, 600, 5000, 100_000):
        budget = policy.config.budget(seq_len)
        read = policy.attended(seq_len) + policy.extra_reads(seq_len)
        assert budget - 2 <= read < budget + 1
        wanted = policy.candidates * policy.attended(seq_len)
        assert wanted <= policy.table_size(seq_len) < wanted + policy.candidates
    # All of a short context are candidates.
    for seq_len in (40, 41, 100):
        assert policy.table_size(seq_len) == policy.attended(seq_len) == seq_len
        assert policy.extra_reads(seq_len) == 0


def test_a_ratio_that_makes_everything_a_candidate_is_refused(policy: RefreshPolicy) -> None:
    # 4 candidates an entry and codes of an eighth of one: 2.67 times as many.
    ratios = {0.37: True, 0.38: False}
    for ratio, accepted in ratios.items():
        config = dataclasses.replace(policy.config, sparsity_ratio=ratio)
        with nullcontext() if accepted else pytest.raises(ValueError, match=r"below 0\.375"):
            build_policy(config)


def test_another_models_basis_is_refused(policy: RefreshPolicy) -> None:
    policy.check_server(LAYERS, KV_HEADS, DIM, in_kernels=True)
    with pytest.raises(ValueError, match=r"basis.safetensors is of another model: .*\(2, 2, 16\)"):
        policy.check_server(LAYERS, KV_HEADS, 2 * DIM, in_kernels=False)


def test_kernels_take_codes_of_64_bits(tmp_path: Path) -> None:
    fitted(2 * DIM).save(tmp_path / "basis")
    policy = build_policy(VegasConfig(policy="vegas-refresh", key_basis=str(tmp_path / "basis")))
    policy.check_server(LAYERS, KV_HEADS, DIM, in_kernels=False)
    with pytest.raises(ValueError, match=r"--vegas-key-basis has 32 bits a key; .* must have 64"):
        policy.check_server(LAYERS, KV_HEADS, DIM, in_kernels=True)


def test_a_step_ranks_the_candidates(policy: RefreshPolicy) -> None:
    """By exact softmax weights in float64, most of them alike; requests of different lengths."""
    lens = (600, 420)
    both = [keys_and_queries(seed=70 + i, n=600) for i in range(2)]
    keys = torch.stack([keys for keys, _ in both])
    keys[1, 420:] = 99.0
    q = torch.stack([queries[0] for _, queries in both])
    tables = torch.full((2, 160), -1)
    for i, seq_len in enumerate(lens):
        size = policy.table_size(seq_len) - 20 * i
        order = torch.randperm(seq_len, generator=torch.Generator().manual_seed(i))
        tables[i, :size] = order[:size]
    # The second request may attend to fewer than this policy's ratio says.
    budgets = (policy.attended(lens[0]), policy.attended(lens[1]) - 7)
    for layer in range(LAYERS):
        chosen = policy.select_step(layer, 0, q, keys, lens, budgets, tables, SCALE)
        assert chosen is not None
        for i in range(len(lens)):
            table = tables[i][tables[i] >= 0]
            mine = chosen[i][chosen[i] >= 0]
            assert len(mine) == budgets[i] == len(set(mine.tolist()))
            assert set(mine.tolist()) <= set(table.tolist())
            of_heads = keys[i, table].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
            scores = torch.einsum("hd,jhd->hj", q[i].double(), of_heads) * SCALE
            weights = scores.softmax(dim=-1).mean(dim=0)
            best = table[weights.topk(len(mine)).indices]
            assert len(set(best.tolist()) & set(mine.tolist())) >= 0.8 * len(mine)
