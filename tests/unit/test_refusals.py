"""What VEGAS refuses to serve, each by name: flags, attention backends, models, layers."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when SGLang is imported

from sgl_vegas import algorithm
from sgl_vegas.model_check import attention_layers
from sgl_vegas.sglang_compat import AttentionArch, RadixAttention, ServerArgs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}

# Field, a value that is refused, and what the user must read.
REFUSED = [
    ("speculative_draft_model_path", "draft", "--speculative-draft-model-path"),
    ("speculative_eagle_topk", 4, "--speculative-eagle-topk"),
    ("speculative_adaptive", True, "--speculative-adaptive"),
    ("speculative_token_map", "map.pt", "--speculative-token-map"),
    ("speculative_accept_threshold_single", 0.9, "--speculative-accept-threshold-single"),
    ("speculative_accept_threshold_acc", 0.5, "--speculative-accept-threshold-single/-acc"),
    ("page_size", 16, "--page-size"),
    ("cuda_graph_backend_prefill", "full", "--cuda-graph-backend-prefill"),
    ("enable_dp_attention", True, "--enable-dp-attention"),
    ("tp_size", 2, "--tp-size"),
    ("enable_streaming_session", True, "--enable-streaming-session"),
    ("smg_grpc_mode", True, "--smg-grpc-mode"),
    ("grammar_backend", "outlines", "--grammar-backend outlines"),
    ("pp_size", 2, "--pp-size"),
    ("dcp_size", 2, "--dcp-size"),
    ("attn_cp_size", 2, "--attn-cp-size"),
    ("disaggregation_mode", "prefill", "--disaggregation-mode"),
    ("disaggregation_mode", "decode", "--disaggregation-mode"),
    ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
    ("enable_lmcache", True, "--enable-lmcache"),
    ("enable_flexkv", True, "--enable-flexkv"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ("enable_pdmux", True, "--enable-pdmux"),
    ("enable_hisparse", True, "--enable-hisparse"),
    ("enable_unified_memory", True, "--enable-unified-memory"),
    ("enable_lora", True, "--enable-lora"),
    ("lora_paths", ["adapter"], "--lora-paths"),
    ("enable_deterministic_inference", True, "--enable-deterministic-inference"),
    ("enable_custom_logit_processor", True, "--enable-custom-logit-processor"),
    ("enable_return_hidden_states", True, "--enable-return-hidden-states"),
    ("return_hidden_states_mode", "last", "--enable-return-hidden-states"),
    ("dllm_algorithm", "LowConfidence", "--dllm-algorithm"),
    ("tokenizer_worker_num", 2, "--tokenizer-worker-num"),
    ("use_ray", True, "--use-ray"),
    ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype"),
    ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype"),
]

ALLOWED = [
    ("speculative_eagle_topk", 1),
    ("page_size", None),
    ("page_size", 1),
    ("dcp_size", None),
    ("lora_paths", []),
    ("kv_cache_dtype", "bfloat16"),
    ("speculative_num_steps", 3),
    ("attention_backend", None),
    ("attention_backend", "torch_native"),
    ("disable_radix_cache", True),
    ("chunked_prefill_size", 512),
]


@pytest.fixture(scope="module")
def plain_args(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    """Resolved arguments of a tiny Llama on a CPU, without speculation."""
    path: Path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return ServerArgs(
        model_path=str(path), load_format="dummy", device="cpu", skip_tokenizer_init=True
    )


@pytest.fixture(autouse=True)
def default_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SGLANG_VEGAS_")]:
        monkeypatch.delenv(name)


def changed(args: ServerArgs, **fields: Any) -> Any:
    result = copy.copy(args)
    # What SGLang derived for the plain arguments would hide the changed field.
    object.__setattr__(result, "_resolved_overrides", [])
    for name, value in fields.items():
        assert hasattr(args, name), f"SGLang has no {name}"
        # SGLang guards resolved arguments against plain assignment.
        object.__setattr__(result, name, value)
    return result


def test_a_plain_llama_is_served(plain_args: ServerArgs) -> None:
    algorithm.validate(plain_args)


@pytest.mark.parametrize(("field", "value"), ALLOWED)
def test_what_is_supported_passes(plain_args: ServerArgs, field: str, value: Any) -> None:
    algorithm.validate(changed(plain_args, **{field: value}))


@pytest.mark.parametrize(("field", "value", "flag"), REFUSED)
def test_flags_are_refused_by_name(
    plain_args: ServerArgs, field: str, value: Any, flag: str
) -> None:
    with pytest.raises(ValueError, match=rf"VEGAS does not support .*{flag}"):
        algorithm.validate(changed(plain_args, **{field: value}))


def test_every_refused_flag_has_a_case_above() -> None:
    for refusal in algorithm._REFUSED_FLAGS:
        assert any(flag in refusal for _, _, flag in REFUSED), refusal


def test_a_flag_that_sglang_derives_counts_as_given(plain_args: ServerArgs) -> None:
    """While SGLang resolves its arguments, derived values are not in the fields yet."""
    args = changed(plain_args)
    object.__setattr__(args, "_resolved_overrides", [("a model's own default", {"page_size": 64})])
    with pytest.raises(ValueError, match="--page-size"):
        algorithm.validate(args)


@pytest.mark.parametrize(
    ("steps", "tokens", "fits"), [(None, 7, True), (3, 4, True), (3, 7, False)]
)
def test_draft_tokens_must_be_steps_and_one(
    plain_args: ServerArgs, steps: int | None, tokens: int, fits: bool
) -> None:
    args = changed(plain_args, speculative_num_steps=steps, speculative_num_draft_tokens=tokens)
    if fits:
        algorithm.validate(args)
    else:
        with pytest.raises(ValueError, match="--speculative-num-draft-tokens"):
            algorithm.validate(args)


@pytest.mark.parametrize(
    ("variable", "value", "flag"),
    [
        ("SGLANG_VEGAS_SPARSITY_RATIO", "0", "--vegas-sparsity-ratio"),
        ("SGLANG_VEGAS_POLICY", "nonsense", "--vegas-policy"),
    ],
)
def test_our_own_settings_are_checked_before_anything_loads(
    plain_args: ServerArgs, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, flag: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=flag):
        algorithm.validate(plain_args)


@pytest.mark.parametrize("steps", [0, -1])
def test_gamma_must_be_positive(plain_args: ServerArgs, steps: int) -> None:
    with pytest.raises(ValueError, match="--speculative-num-steps"):
        algorithm.validate(changed(plain_args, speculative_num_steps=steps))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ({"device": "cuda", "attention_backend": "torch_native"}, "--attention-backend"),
        ({"device": "cuda", "attention_backend": "flashmla"}, "--attention-backend flashmla"),
        ({"device": "xpu"}, "xpu"),
        ({"device": "cuda", "max_running_requests": 2048}, "--max-running-requests 2048"),
        (
            {"device": "cuda", "attention_backend": "fa3", "decode_attention_backend": "triton"},
            "--attention-backend alone",
        ),
    ],
)
def test_attention_backends_are_refused(
    plain_args: ServerArgs, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        algorithm.validate(changed(plain_args, **fields))


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", None])
def test_attention_backends_on_a_gpu(plain_args: ServerArgs, backend: str | None) -> None:
    algorithm.validate(changed(plain_args, device="cuda", attention_backend=backend))


def model_stub(name: str = "SomeForCausalLM", text: dict | None = None, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "attention_arch": AttentionArch.MHA,
        "is_hybrid_swa": False,
        "is_encoder_decoder": False,
        "is_multimodal": False,
        "head_dim": 128,
        "hf_config": SimpleNamespace(architectures=[name]),
        "hf_text_config": SimpleNamespace(**(text or {})),
    }
    model = SimpleNamespace(**{**values, **changes})
    return SimpleNamespace(get_model_config=lambda: model, device="cuda")


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        (model_stub(attention_arch=AttentionArch.MLA), "multi-head or grouped-query"),
        (model_stub(is_hybrid_swa=True), "sliding-window"),
        (model_stub(is_encoder_decoder=True), "encoder-decoder"),
        (model_stub(is_multimodal=True), "images or audio"),
        (model_stub(text={"layer_types": ["linear_attention", "full_attention"]}), "linear-att"),
        (model_stub(text={"mamba_d_state": 128}), "state-space"),
        (model_stub(text={"ssm_state_size": 128}), "state-space"),
        (model_stub(text={"linear_num_key_heads": 16}), "linear-attention"),
        (model_stub("GptOssForCausalLM"), "sinks"),
        (model_stub(head_dim=96), "head dim"),
    ],
)
def test_models_are_refused_by_name(stub: Any, words: str) -> None:
    name = stub.get_model_config().hf_config.architectures[0]
    with pytest.raises(ValueError, match=rf"{name}.*{words}"):
        algorithm._validate_model(stub)


@pytest.mark.parametrize("text", [{}, {"layer_types": None}, {"layer_types": ["full_attention"]}])
def test_plain_models_pass(text: dict) -> None:
    algorithm._validate_model(model_stub(text=text))


def layer(layer_id: int, **changes: Any) -> RadixAttention:
    values: dict[str, Any] = {"num_heads": 4, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2}
    return RadixAttention(**{**values, **changes}, layer_id=layer_id)


class Model(torch.nn.Module):
    def __init__(self, *layers: RadixAttention) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(each) for each in layers])


def test_attention_layers_come_by_layer_id() -> None:
    layers = [layer(2), layer(0), layer(1)]
    assert attention_layers(Model(*layers)) == [layers[1], layers[2], layers[0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window_size": 128}, "sliding window"),
        ({"sliding_window_size": 0x7FFF}, "sliding window"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"logit_cap": 30.0}, "soft-capped"),
        ({"v_head_dim": 32}, "value heads"),
        ({"scaling": 0.25}, "logit scale"),
        ({"num_heads": 8}, "number of heads"),
        ({"num_kv_heads": 4}, "number of heads"),
        ({"head_dim": 128}, "number of heads"),
    ],
)
def test_layers_are_refused_by_number(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"Model: layer 1 has .*{words}"):
        attention_layers(Model(layer(0), layer(1, **changes)))


@pytest.mark.parametrize("ids", [[0, 0], [0, 2], [1]])
def test_shared_or_missing_layers_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="one attention of its own"):
        attention_layers(Model(*[layer(i) for i in ids]))
