"""The laboratory on a tiny model, against forward passes with explicit masks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

from sgl_vegas.config import VegasConfig
from sgl_vegas.lab.__main__ import main
from sgl_vegas.lab.groups import Lane
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.prompts import load_prompts, shipped_prompts
from sgl_vegas.lab.run import LabRun
from sgl_vegas.lab.sampling import Sampling
from sgl_vegas.lab.text import Text, write_texts
from sgl_vegas.selection.policy import build_policy
from tests.tiny_model import VOCAB_SIZE, make_tiny_model

GAMMA, ITERATIONS = 4, 6
PROMPTS = [
    (name, torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)))
    for name, length in (("long", 150), ("short", 60))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    model = make_tiny_model(folder)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def lab_model(folder: Path, reference: LlamaForCausalLM, monkeypatch_module: Any) -> LabModel:
    return LabModel(folder, "cpu", torch.float64)


@pytest.fixture(scope="module")
def monkeypatch_module(folder: Path):
    """The tiny model has no tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_vegas.lab.model.AutoTokenizer.from_pretrained", lambda path: None)
        yield patch


@pytest.fixture(scope="module")
def texts(lab_model: LabModel) -> list[Text]:
    return written(lab_model, Sampling())


def written(model: LabModel, sampling: Sampling) -> list[Text]:
    prompts = [(name, ids.tolist()) for name, ids in PROMPTS]
    num_new = ITERATIONS * (GAMMA + 1) + 1
    return write_texts(model, prompts, num_new, sampling, 0, lambda *_: None)


def lane(text: Text, policy: str, ratio: float = 0.1) -> Lane:
    config = VegasConfig(GAMMA, ratio, min_tokens=8, policy=policy)
    return Lane(text, build_policy(config))


def run(model: LabModel, lanes: list[Lane], sampling: Sampling | None = None) -> LabRun:
    return LabRun(model, lanes, GAMMA, sampling or Sampling(), seed=0)


@torch.no_grad()
def logits_of(reference: LlamaForCausalLM, ids: list[int], mask: torch.Tensor) -> torch.Tensor:
    """(n, vocab) of one forward pass where token i sees the tokens j of `mask[i, j]`."""
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    return reference(torch.tensor([ids]), attention_mask=bias[None, None]).logits[0]


@torch.no_grad()
def test_the_text_is_the_targets_own(reference: LlamaForCausalLM, texts: list[Text]) -> None:
    for (_, prompt), text in zip(PROMPTS, texts, strict=True):
        assert text.ids[: text.prompt_len].tolist() == prompt.tolist()
        logits = reference(text.ids[None]).logits[0]
        expected = logits[text.prompt_len - 1 : -1]
        torch.testing.assert_close(text.logits, expected, rtol=0, atol=1e-4)
        assert text.ids[text.prompt_len :].tolist() == expected.argmax(dim=-1).tolist()


def test_streaming_drafts_as_with_a_mask(
    reference: LlamaForCausalLM, lab_model: LabModel, texts: list[Text]
) -> None:
    """Every layer's list is the same there, so one mask says what drafts may see."""
    lanes = [lane(text, "streaming") for text in texts]
    lab = run(lab_model, lanes)
    for _ in range(ITERATIONS):
        before = [(lab.bases[i], lab.seq_lens[i]) for i in range(len(lanes))]
        lab.iterate(measure_coverage=True)
        for one, (base, seq_len) in zip(lanes, before, strict=True):
            ids = one.text.ids.tolist()
            budget = max(math.ceil(0.1 * base), 8)
            hidden = range(4, base - budget + 4)
            drafted = [ids[seq_len]]
            for _ in range(GAMMA):
                sequence = ids[:seq_len] + drafted
                mask = torch.ones(len(sequence), len(sequence)).tril().bool()
                mask[seq_len:, hidden.start : hidden.stop] = False
                drafted.append(int(logits_of(reference, sequence, mask)[-1].argmax()))
            right = [a == b for a, b in zip(drafted[1:], ids[seq_len + 1 :], strict=False)]
            expected = right.index(False) if False in right else GAMMA
            assert one.accepted[-1] == expected
    assert any(count < GAMMA for one in lanes for count in one.accepted)


@pytest.mark.parametrize("policy", ["vegas", "all-queries", "last-accepted"])
@torch.no_grad()
def test_tables_are_of_the_passs_weights(
    policy: str, reference: LlamaForCausalLM, lab_model: LabModel, texts: list[Text]
) -> None:
    one = lane(texts[0], policy)
    lab = run(lab_model, [one])
    captured: list[torch.Tensor] = []
    verify = lab._verify
    lab._verify = lambda drafts: (captured.append(drafts), verify(drafts))  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):
        seq_len = lab.seq_lens[0]
        lab.iterate(measure_coverage=False)
        sequence = texts[0].ids[:seq_len].tolist() + captured[-1][0].tolist()
        attentions = reference(torch.tensor([sequence]), output_attentions=True).attentions
        queries = {
            "vegas": [seq_len, seq_len + GAMMA],
            "all-queries": list(range(seq_len, seq_len + GAMMA + 1)),
            "last-accepted": [seq_len + one.accepted[-1]],
        }[policy]
        for layer, weights in enumerate(attentions):
            values = weights[0][:, queries, :seq_len].mean(dim=(0, 1))
            expected = values.topk(max(math.ceil(0.1 * seq_len), 8)).indices
            table = lab.tables[layer, 0]
            table = table[table >= 0]
            assert sorted(table.tolist()) == sorted(expected.tolist())


@torch.no_grad()
def test_coverage_is_the_weight_that_drafts_see(
    reference: LlamaForCausalLM, lab_model: LabModel, texts: list[Text]
) -> None:
    """Of the first layer at the first step: its query is the same however sparse drafts are."""
    dense, sparse = lane(texts[0], "dense"), lane(texts[0], "streaming")
    lab = run(lab_model, [dense, sparse])
    lab.iterate(measure_coverage=False)
    seen: list[torch.Tensor] = []
    coverage = lab._coverage
    lab._coverage = lambda *arguments: seen.append(coverage(*arguments)) or seen[-1]  # pyright: ignore[reportAttributeAccessIssue]
    seq_len, base = lab.seq_lens[1], lab.bases[1]
    lab.iterate(measure_coverage=True)
    ids = texts[0].ids[None, : seq_len + 1]
    weights = reference(ids, output_attentions=True).attentions[0][0, :, -1]
    budget = math.ceil(0.1 * base)
    attended = [*range(4), *range(base - budget + 4, seq_len + 1)]
    expected = float(weights[:, attended].sum(dim=1).mean())
    assert float(seen[0][1]) == pytest.approx(expected, abs=1e-4)
    assert expected < 0.9
    assert [share for _, share in dense.covered] == pytest.approx([1.0] * GAMMA)
    assert [step for step, _ in sparse.covered] == list(range(GAMMA))


def test_everything_seen_is_everything_accepted(lab_model: LabModel, texts: list[Text]) -> None:
    lanes = [lane(texts[0], "dense"), lane(texts[1], "vegas", 1.0), lane(texts[0], "oracle", 1.0)]
    lab = run(lab_model, lanes)
    for _ in range(ITERATIONS):
        lab.iterate(measure_coverage=False)
    assert all(one.accepted == [GAMMA] * ITERATIONS for one in lanes)


def test_lanes_do_not_depend_on_their_batch(lab_model: LabModel, texts: list[Text]) -> None:
    policies = ("vegas", "streaming", "quest", "last-accepted", "all-queries", "oracle")
    shared = [lane(texts[0], name, ratio).policy for name in policies for ratio in (0.1, 0.2)]
    # A policy is asked for its lanes in one call, some of them of one text or of other ratios.
    together = [Lane(text, policy) for policy in shared for text in (*texts, texts[1])]
    lab = run(lab_model, together)
    for _ in range(ITERATIONS):
        lab.iterate(measure_coverage=False)
    for one in together:
        alone = Lane(one.text, one.policy)
        lab = run(lab_model, [alone])
        for _ in range(ITERATIONS):
            lab.iterate(measure_coverage=False)
        assert alone.accepted == one.accepted
        assert alone.read_shares == pytest.approx(one.read_shares)


def test_coupled_drafts_have_the_draft_distribution() -> None:
    """Over texts of p, drafts are distributed as q, and accepted as often as sum(min(p, q))."""
    n, vocab = 40_000, 6
    generator = torch.Generator().manual_seed(1)
    sampling = Sampling(temperature=0.8, top_p=0.9)
    draft_logits, target_logits = (torch.randn(vocab, generator=generator) for _ in range(2))
    q, p = (sampling.probabilities(x[None])[0] for x in (draft_logits, target_logits))
    text = torch.multinomial(p, n, replacement=True, generator=generator)
    drafts = sampling.couple(
        draft_logits.expand(n, -1),
        target_logits.expand(n, -1),
        text,
        torch.rand(n, generator=generator),
        generator,
    )
    counts = torch.bincount(drafts, minlength=vocab)
    possible = q > 0
    assert counts[~possible].sum() == 0
    expected = (q[possible].double() / q[possible].double().sum()) * n
    assert chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3
    rate = float(torch.minimum(p, q).sum())
    error = math.sqrt(rate * (1 - rate) / n)
    assert abs(float((drafts == text).float().mean()) - rate) < 4 * error


def test_sampled_lanes_share_their_text(lab_model: LabModel) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.95)
    texts = written(lab_model, sampling)
    lanes = [lane(texts[0], "dense"), lane(texts[0], "streaming")]
    lab = run(lab_model, lanes, sampling)
    for _ in range(ITERATIONS):
        lab.iterate(measure_coverage=False)
    assert lanes[0].accepted == [GAMMA] * ITERATIONS
    assert any(count < GAMMA for count in lanes[1].accepted)


class Words:
    """A tokenizer of words, by their length."""

    def __len__(self) -> int:
        return 100

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join("x" * count for count in ids)

    def apply_chat_template(self, messages, tokenize: bool, add_generation_prompt: bool) -> str:
        return " ".join(message["content"] for message in messages)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    lines = [
        {"prompt": "a bb ccc", "name": "first"},
        {"messages": [{"role": "user", "content": "dddd e"}]},
        {"input_ids": [5, 6]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert load_prompts(path, Words()) == [("first", [1, 2, 3]), ("2", [4, 1]), ("3", [5, 6])]


def test_prompts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one two")
    (tmp_path / "a.md").write_text("three")
    (tmp_path / "c.py").write_text("no prompt")
    assert load_prompts(tmp_path, Words()) == [("a.md", [5]), ("b.txt", [3, 3])]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no prompts"),
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not an object"),
        ('{"prompt": 3}', "needs prompt"),
        ('{"prompt": ""}', "empty"),
        ('{"input_ids": [1, 100]}', "tokens of the model"),
        ('{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}', "one name"),
    ],
)
def test_bad_prompt_files_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        load_prompts(path, Words())


def test_the_shipped_set_has_three_prompts_of_each_kind() -> None:
    prompts = shipped_prompts(Words(), sizes=(300, 400, 500))
    assert len({name for name, _ in prompts}) == 15
    assert all(100 < len(ids) <= 500 for _, ids in prompts)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--policies", "vegas", "vega"), "--vegas-policy must be one of"),
        (("--ratios", "7"), "--vegas-sparsity-ratio"),
        (("--gammas", "0"), "--speculative-num-steps"),
        (("--iterations", "0"), "--iterations"),
        (("--temperatures", "-1"), "temperatures"),
        (("--iterations", "50"), "Prompt 1 has 240 tokens"),
    ],
)
def test_what_cannot_run_is_refused_first(
    flags: tuple[str, ...], reason: str, folder: Path, reference: Any, tmp_path: Path
) -> None:
    prompts = tmp_path / "some.jsonl"
    prompts.write_text(json.dumps({"input_ids": [1] * 240}))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=reason):
        patch.setattr("sgl_vegas.lab.model.AutoTokenizer.from_pretrained", lambda path: Words())
        main(["--model-path", str(folder), "--prompts", str(prompts), "--device", "cpu", *flags])


@pytest.mark.usefixtures("monkeypatch_module", "reference")
def test_the_command_writes_rows_and_a_plot(folder: Path, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "some.jsonl"
    prompts.write_text("\n".join(json.dumps({"input_ids": ids.tolist()}) for _, ids in PROMPTS))
    out, picture = tmp_path / "lab.json", tmp_path / "lab.svg"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_vegas.lab.model.AutoTokenizer.from_pretrained", lambda path: Words())
        main(
            [
                *("--model-path", str(folder), "--prompts", str(prompts)),
                *("--policies", "vegas", "streaming", "--ratios", "0.1", "0.3"),
                *("--gammas", "3", "--temperatures", "0", "0.6", "--iterations", "5"),
                *("--out", str(out), "--plot", str(picture), "--device", "cpu"),
                *("--dtype", "float32", "--batch-gb", "0.0001", "--coverage-every", "2"),
            ]
        )
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["prompts"] == 2 and row["iterations"] == 10
        rates = list(row["by_prompt"].values())
        assert row["tokens_per_iteration"] == pytest.approx(sum(rates) / 2)
        assert row["stderr"] == pytest.approx(abs(rates[0] - rates[1]) / 2)
        assert len(row["acceptance_by_position"]) == len(row["covered_by_position"]) == 3
        assert row["ratio"] < row["read_share"] < row["ratio"] + 0.15
    assert picture.read_text().startswith("<?xml")
    assert "less vegas" in capsys.readouterr().out
