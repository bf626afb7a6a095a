"""Request bodies that hypothesis makes up: right ones, wrong ones, and everything in between."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from tests.tiny_model import CONTEXT_LEN, VOCAB_SIZE

Strategy = st.SearchStrategy[Any]
# Of an object, beside those that it must have: more would hardly ever be right all at once.
MOST_FIELDS = 5

_numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**63, -(2**63), 2**70]), st.floats()
)
# Anything that JSON can say.
_junk = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, st.text(max_size=40)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def _mostly(draw: Any, usual: Strategy, otherwise: Strategy = _junk) -> Any:
    """`usual`, nine times in ten."""
    return draw(otherwise if draw(st.integers(0, 9)) == 9 else usual)


@st.composite
def _some_of(
    draw: Any, fields: dict[str, Strategy], required: dict[str, Strategy] | None = None
) -> dict[str, Any]:
    """Objects with a few of `fields`, and now and then one that nobody knows."""
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=MOST_FIELDS, unique=True))
    values = {**{name: fields[name] for name in names}, **(required or {})}
    found = {name: draw(_mostly(value)) for name, value in values.items()}
    if draw(st.integers(0, 19)) == 19:
        found[draw(st.text(min_size=1, max_size=8))] = draw(_junk)
    return found


_texts = _mostly(st.text("abc XYZ 019 {}<>/", min_size=1, max_size=40), st.text(max_size=40))
_token = st.integers(0, VOCAB_SIZE - 1)
_any_token = _mostly(_token, st.sampled_from([-1, VOCAB_SIZE, 2**31, 2**63, -(2**40)]))
_ids = _mostly(
    st.lists(_token, min_size=1, max_size=60),
    st.one_of(
        st.lists(_any_token, max_size=8),
        st.integers(CONTEXT_LEN - 20, CONTEXT_LEN + 5).map(lambda n: [n % 7] * n),
    ),
)
_stops = st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3))
_schemas = st.sampled_from(
    ['{"type": "integer"}', '{"type": "string", "maxLength": 4}', "{}", "{", '{"$ref": "#"}', "[]"]
)
_regexes = st.sampled_from(["[a-c]{1,9}", "(", "a*", "", "(a|b)+?c", "\\d{2}", "[", "a{1,9999}"])
_ebnfs = st.sampled_from(['root ::= "a" root | "b"', "root ::=", "root ::= root", "x", ""])
_floats = _mostly(st.floats(0, 2), st.sampled_from([-1.0, 1e-9, 1e9]))
# Sizes are few, so that 5,000 requests take minutes; the largest run into the context limit.
_lengths = _mostly(st.integers(0, 24), st.sampled_from([CONTEXT_LEN, 10**9, -1]))
_penalty = _mostly(st.floats(-2, 2), st.sampled_from([-3.0, 3.0]))
_biases = st.dictionaries(
    _any_token.map(str),
    _mostly(st.floats(-100, 100), st.sampled_from([1e30, -1e30, 1e300, math.inf, math.nan])),
    max_size=4,
)

_sampling = _some_of(
    {
        "max_new_tokens": _lengths,
        "min_new_tokens": st.integers(-1, 30),
        "top_p": st.floats(-0.1, 1.1),
        "top_k": st.one_of(st.integers(-2, VOCAB_SIZE + 4), st.sampled_from([2**30, 2**31, 2**70])),
        "min_p": st.floats(-0.1, 1.1),
        "frequency_penalty": _penalty,
        "presence_penalty": _penalty,
        "repetition_penalty": st.floats(-0.1, 2.1),
        "stop": _stops,
        "stop_token_ids": st.lists(_any_token, max_size=4),
        "stop_regex": st.one_of(_regexes, st.lists(_regexes, max_size=2)),
        "ignore_eos": st.booleans(),
        "n": st.integers(-1, 4),
        "json_schema": _schemas,
        "regex": _regexes,
        "ebnf": _ebnfs,
        "structural_tag": _schemas,
        "logit_bias": _biases,
        "sampling_seed": st.integers(),
        "skip_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "stream_interval": st.integers(-1, 9),
        "custom_params": _junk,
        "is_normalized": st.booleans(),
        "stop_str_max_len": st.integers(-5, 5),
    },
    # Greedy often: then plain SGLang must answer alike.
    {"max_new_tokens": _lengths, "temperature": st.one_of(st.just(0), st.just(0.0), _floats)},
)

_generate = _some_of(
    {
        "text": st.one_of(_texts, st.lists(_texts, max_size=3)),
        "input_ids": st.one_of(_ids, st.lists(_ids, max_size=3)),
        "sampling_params": st.one_of(_sampling, st.lists(_sampling, max_size=3)),
        "stream": st.booleans(),
        "return_logprob": st.booleans(),
        "logprob_start_len": st.integers(-2, 50),
        "top_logprobs_num": st.one_of(st.integers(-1, 5), st.just(10**6)),
        "token_ids_logprob": st.lists(_any_token, max_size=4),
        "return_text_in_logprobs": st.booleans(),
        "return_hidden_states": st.booleans(),
        "return_sampling_mask": st.booleans(),
        "return_routed_experts": st.booleans(),
        "return_indexer_topk": st.booleans(),
        "return_entropy": st.booleans(),
        "return_prompt_token_ids": st.booleans(),
        "return_flat_raw_top_logprobs": st.booleans(),
        "input_embeds": st.lists(st.lists(st.floats(-1, 1), max_size=4), max_size=3),
        "image_data": _junk,
        "custom_logit_processor": _texts,
        "lora_path": _texts,
        "session_params": _junk,
        "extra_key": _texts,
        "priority": st.integers(),
        "routed_dp_rank": st.integers(-2, 4),
        "require_reasoning": st.booleans(),
        "max_thinking_tokens": st.integers(-1, 5),
        "multi_item_delimiter_indices": st.lists(st.integers(-1, 9), max_size=3),
        "positional_embed_overrides": _junk,
        "bootstrap_room": st.integers(),
        "no_logs": st.booleans(),
    },
    {"input_ids": _ids, "sampling_params": _sampling},
)

_openai = {
    "model": _texts,
    "max_tokens": _lengths,
    "temperature": _floats,
    "top_p": st.floats(-0.1, 1.1),
    "n": st.integers(-1, 4),
    "seed": st.integers(),
    "stop": _stops,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "repetition_penalty": st.floats(-0.1, 2.1),
    "logit_bias": _biases,
    "regex": _regexes,
    "ebnf": _ebnfs,
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(-1, 30),
    "top_k": st.integers(-2, 99),
    "min_p": st.floats(-0.1, 1.1),
    "user": _texts,
}
_messages = st.lists(
    _some_of(
        {"name": _texts},
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", "nobody"]),
            "content": _texts,
        },
    ),
    max_size=3,
)
_tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": _texts, "parameters": _junk}),
        }
    ),
    max_size=2,
)
_chat = _some_of(
    {
        **_openai,
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(-1, 30),
        "response_format": st.sampled_from(
            [{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "x"}]
        ),
        "tools": _tools,
        "tool_choice": st.sampled_from(["auto", "none", "required", "x"]),
        "separate_reasoning": st.booleans(),
    },
    {"messages": _messages, "max_tokens": _lengths, "model": st.just("default")},
)
_completion = _some_of(
    {**_openai, "logprobs": st.integers(-1, 30), "echo": st.booleans(), "suffix": _texts},
    {
        "prompt": st.one_of(_texts, _ids, st.lists(_texts, max_size=3)),
        "max_tokens": _lengths,
        "model": st.just("default"),
    },
)
_text_and_ids = _some_of(
    {
        "text": _texts,
        "input": _texts,
        "prompt": _texts,
        "tokens": _ids,
        "input_ids": _ids,
        "query": _texts,
        "items": st.lists(_texts, max_size=3),
        "documents": st.lists(_texts, max_size=3),
        "label_token_ids": st.lists(_any_token, max_size=3),
        "messages": _messages,
        "model": _texts,
        "max_tokens": _lengths,
        "max_output_tokens": _lengths,
        "options": _junk,
        "rid": _texts,
        "instances": st.lists(_some_of({"text": _texts}), max_size=2),
        "parameters": _junk,
        "stream": st.booleans(),
        "capacity_of_str_len": st.integers(-1, 99),
        "session_id": _texts,
        "tools": _tools,
        "tool_call_parser": st.sampled_from(["qwen25", "x"]),
        "reasoning_parser": st.sampled_from(["deepseek-r1", "x"]),
    }
)

# An administrator's endpoints are left out (they may stop a server on purpose), and what waits for
# other machines.
_OTHERS = (
    *("/encode", "/classify", "/v1/embeddings", "/v1/classify", "/tokenize", "/v1/tokenize"),
    *("/detokenize", "/v1/detokenize", "/v1/score", "/v1/rerank", "/v1/responses", "/api/chat"),
    *("/api/generate", "/api/show", "/v1/messages", "/v1/messages/count_tokens", "/invocations"),
    *("/vertex_generate", "/parse_function_call", "/separate_reasoning", "/open_session"),
    *("/close_session", "/v1/audio/transcriptions", "/load_lora_adapter_from_tensors"),
    *("/set_trace_level", "/nothing"),
)
REQUESTS: Strategy = st.one_of(
    st.tuples(st.just("/generate"), _generate),
    st.tuples(st.just("/generate"), _generate),
    st.tuples(st.just("/v1/chat/completions"), _chat),
    st.tuples(st.just("/v1/completions"), _completion),
    st.tuples(st.sampled_from(("/generate", "/v1/completions")), _junk),
    st.tuples(st.sampled_from(_OTHERS), _text_and_ids),
)
