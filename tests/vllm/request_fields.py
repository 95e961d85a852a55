"""What a gateway does with each field of vLLM's requests (0.32): decided by somebody who read what vLLM does with it.

A field is judged by its name, whatever the API: the gateway does not ask for more. A field of a model inside a request
is named with the field that holds it: `stream_options.include_usage`. Names that vLLM no longer has stay while older
engines know them (0.30 and newer are supported).

Where does a new field belong? In `gateway.request.reader.TRUSTED_FIELDS`, if by it a client could act on other tenants
or on the engine past the gateway: it names a request, a session or an image, changes the order of the queue, steers a
connector, or changes what the engine publishes. In `PASSED`, if it says only what this one answer shall be. Two kinds
need code first: what changes the prompt is read in `gateway/prompt`, and what names a URL obeys `security.image_hosts`.
"""

from __future__ import annotations

from typing import Final

from gateway.request.reader import TRUSTED_FIELDS

STRIPPED: Final = frozenset({*TRUSTED_FIELDS, "priority"})
"""Taken out of every body; `priority` unless `security.allow_priority`."""

OVERWRITTEN: Final = {
    "cache_salt": "with API keys it is the tenant's own, made with the client's; forms have none",
    "stream_options": "a stream is asked for its usage; the other options stay",
    "return_token_ids": "asked for where the agent of an engine older than 0.30 has to learn a prompt's tokens",
    "content.uuid": "an image in a chat gets its digest; any other medium gets none",
}
"""Not what the client says, but what is said here reaches the engine."""

_PASSED: Final = {
    "the prompt, in the words of each API": """model messages prompt prompt_embeds suffix input instructions system
        query queries documents items data_1 data_2 text_1 text_2 data tokens state questions file
        tools tool_choice reasoning reasoning_effort thinking output_config previous_response_id previous_input_messages
        add_generation_prompt add_special_tokens continue_final_message truncate_prompt_tokens truncation_side
        truncation padding instruction max_tokens_per_query max_tokens_per_doc language to_language hotwords""",
    "URLs of media outside of messages": "images audio videos",
    # --trust-request-chat-template, --trust-request-mm-kwargs
    "what vLLM 0.32 refuses unless started with a flag": """chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs""",
    "how this request's tokens are chosen, and when they end": """temperature top_p top_k min_p seed n best_of
        use_beam_search length_penalty early_stopping frequency_penalty presence_penalty repetition_penalty logit_bias
        allowed_token_ids bad_words max_tokens max_completion_tokens max_output_tokens min_tokens max_tool_calls
        ignore_eos stop stop_sequences stop_token_ids thinking_token_budget repetition_detection response_format
        structured_outputs guided_decoding_backend text parallel_tool_calls watermarking""",
    "what the answer holds, and how it comes": """stream stream_interval stream_include_usage
        stream_continuous_usage_stats echo logprobs top_logprobs prompt_logprobs logprob_token_ids include
        include_reasoning include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
        return_tokens_as_token_ids return_token_offsets return_token_strs return_prompt_text return_mm_kwargs mm_payload
        return_assistant_tokens_mask routed_experts_prompt_start enable_response_messages timestamp_granularities
        timestamp_granularities[] encoding_format embed_dtype endianness dimensions use_activation task top_n store
        background""",
    "what no engine uses": "user metadata service_tier prompt_cache_key",
}

_PASSED_INSIDE: Final = {
    "messages input": "role content name reasoning task tool_call_id tool_calls tools",
    "query queries documents items data_1 data_2 text_1 text_2": "content",
    "content system": """type text thinking signature data source content id name input is_error tool tool_name
        tool_use_id""",
    "content": "image_url audio_url video_url image_pil image_embeds audio_embeds video_embeds closed",
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
    "questions": "type instructions criteria",
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
"""Reaches the engine as the client wrote it."""

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
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/v1/systemone",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)
"""Where the names above mean what they mean in the other APIs: a new path is read before its names are trusted."""

WITHOUT_ENGINE: Final = frozenset({"/v1/chat/completions/derender", "/v1/completions/derender"})
"""Paths that write an engine's tokens out as text, and ask no engine: their fields are not judged."""
