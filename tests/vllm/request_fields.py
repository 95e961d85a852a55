"""How a gateway treats each field of vLLM's requests (0.33). A person read how vLLM uses the field and decided.

The decision depends only on a field's name, on every API, because the gateway looks only at the name. A field of a
nested model has the name of the field that holds it in front: `stream_options.include_usage`. Names that vLLM no longer
has stay here while older engines know them (0.30 and newer are supported).

Where does a new field belong? In `gateway.request.reader.TRUSTED_FIELDS`, if a client could use it to affect other
tenants, or the engine behind the gateway's back: it names a request, a session or an image, changes the order of the
queue, steers a connector, or changes the engine's events. In `PASSED`, if it affects only this one answer. Two kinds
need code first: `gateway/prompt` must read a field that changes the prompt, and a field with a URL must obey
`security.image_hosts`.
"""

from __future__ import annotations

from typing import Final

from gateway.request.reader import TRUSTED_FIELDS

STRIPPED: Final = frozenset({*TRUSTED_FIELDS, "priority"})
"""Fields removed from every body. `priority` stays with `security.allow_priority`."""

REFUSED: Final = frozenset({"features", "sampling_params.extra_args"})
"""Of /inference/v1/generate: a body with `features` gets a 400; `extra_args` is removed."""

OVERWRITTEN: Final = {
    "cache_salt": "with API keys it is the tenant's own, made with the client's; forms have none",
    "stream_options": "a stream is asked for its usage; the other options stay",
    "return_token_ids": "asked for where the agent of an engine older than 0.30 has to learn a prompt's tokens",
    "content.uuid": "an image in a chat gets its digest; any other medium gets none",
}
"""Fields whose value the gateway sets as described here, whatever the client sends."""

_PASSED: Final = {
    "the prompt, in the words of each API": """model messages prompt prompt_embeds suffix input instructions system
        query queries documents items data_1 data_2 text_1 text_2 data tokens state questions file
        tools tool_choice reasoning reasoning_effort thinking output_config previous_response_id previous_input_messages
        add_generation_prompt add_special_tokens continue_final_message truncate_prompt_tokens truncation_side
        truncation padding instruction max_tokens_per_query max_tokens_per_doc language to_language hotwords
        texts inputs input_type token_ids token_offsets content_parts item_first truncate""",
    "URLs of media outside of messages": "images audio videos",
    # --trust-request-chat-template, --trust-request-mm-kwargs
    "what vLLM 0.33 refuses unless started with a flag": """chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs""",
    "how this request's tokens are chosen, and when they end": """temperature top_p top_k min_p seed n best_of
        use_beam_search length_penalty early_stopping frequency_penalty presence_penalty repetition_penalty logit_bias
        allowed_token_ids bad_words max_tokens max_completion_tokens max_output_tokens min_tokens max_tool_calls
        ignore_eos stop stop_sequences stop_token_ids thinking_token_budget repetition_detection response_format
        structured_outputs guided_decoding_backend text parallel_tool_calls watermarking joint sampling_params
        reasoning_ended reasoning_parser_kwargs label_token_ids apply_softmax""",
    "what the answer holds, and how it comes": """stream stream_interval stream_include_usage
        stream_continuous_usage_stats echo logprobs top_logprobs prompt_logprobs logprob_token_ids include
        include_reasoning include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
        return_tokens_as_token_ids return_token_offsets return_token_strs return_prompt_text return_mm_kwargs mm_payload
        return_assistant_tokens_mask routed_experts_prompt_start enable_response_messages timestamp_granularities
        timestamp_granularities[] encoding_format embed_dtype endianness dimensions use_activation task top_n store
        background return_weight_versions late_chunking_params output_dimension embedding_types output_mode
        parse_context""",
    "what no engine uses": """user metadata service_tier prompt_cache_key prompt_cache_options prompt_cache_retention
        safety_identifier""",
}

_PASSED_INSIDE: Final = {
    "messages input": "role content name reasoning task tool_call_id tool_calls tools",
    "query queries documents items data_1 data_2 text_1 text_2": "content",
    "content system": """type text thinking signature data source content id name input is_error tool tool_name
        tool_use_id""",
    "content": "image_url audio_url video_url image_pil image_embeds audio_embeds video_embeds closed",
    "reasoning": "type data",
    "audio_url video_url": "url",
    "image_pil": "image_pil",
    "tools": "type function name description input_schema strict defer_loading",
    "function": "name description parameters strict defer_loading",
    "tool_choice": "type name function disable_parallel_tool_use",
    "thinking": "type budget_tokens display",
    "output_config": "effort format",
    "response_format": "type json_schema format structures triggers",
    "json_schema": "name description schema json_schema strict",
    "structures": "begin end schema structural_tag_schema",
    "format": "type schema json_schema",
    "structured_outputs": """json regex choice grammar json_object structural_tag whitespace_pattern
        disable_any_whitespace disable_additional_properties""",
    "repetition_detection": "max_pattern_size min_pattern_size min_count",
    "stream_options": "include_usage continuous_usage_stats",
    "questions": "type instructions criteria name choices levels",
    "choices": "value description",
    "levels": "label description",
    "input": "type",
    "inputs": "content",
    "reasoning_parser_kwargs": "chat_template_kwargs",
    "parse_context": """tools tool_choice parallel_tool_calls include_reasoning chat_template_kwargs
        history_tool_call_cnt""",
    # Of `features`, which is refused.
    "features": "mm_hashes mm_placeholders kwargs_data mm_metadata",
    "mm_placeholders": "offset length",
    "prompt_cache_options": "mode ttl comparison_response_id prewarm",
    "late_chunking_params": "chunk_size",
}

PASSED: Final = frozenset(
    [
        *" ".join(_PASSED.values()).split(),
        *(
            f"{holder}.{field}"
            for holders, fields in _PASSED_INSIDE.items()
            for holder in holders.split()
            for field in fields.split()
        ),
    ]
)
"""Fields that reach the engine as the client wrote them."""

PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/tokenize",
        "/detokenize",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v2/embed",
        "/v1/decisions",
        "/generative_scoring",
        "/inference/v1/generate",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/v1/systemone",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)
"""Paths on which the names above mean the same as in the other APIs. A person must read a new path's fields first."""

WITHOUT_ENGINE: Final = frozenset({"/v1/chat/completions/derender", "/v1/completions/derender"})
"""Paths that turn an engine's tokens into text and use no engine. Their fields need no decision."""
