"""Which of vLLM's tests run, and which differences are decisions of KVGate's."""

from __future__ import annotations

from typing import Final

FILES: Final = tuple(
    f"tests/entrypoints/{path}"
    for path in (
        "openai/completion/test_completion.py",
        "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_completion.py",
        "openai/chat_completion/test_batched_chat_completions.py",
        "openai/chat_completion/test_chat_logit_bias_validation.py",
        "openai/chat_completion/test_enable_force_include_usage.py",
        "openai/chat_completion/test_include_reasoning.py",
        "openai/chat_completion/test_logprob_token_ids.py",
        "openai/chat_completion/test_completion_with_function_calling.py",
        "openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
        "openai/chat_completion/test_root_path.py",
        "openai/completion/test_completion_with_prompt_embeds.py",
        "openai/completion/test_prompt_validation.py",
        "openai/completion/test_token_in_token_out.py",
        "openai/decisions/test_decisions_e2e.py",
        "openai/models/test_models.py",
        "openai/responses/test_basic.py",
        "openai/responses/test_errors.py",
        "openai/responses/test_function_call.py",
        "openai/responses/test_simple.py",
        "openai/responses/test_stateful.py",
        "openai/responses/test_structured_output.py",
        "openai/test_chunked_prompt.py",
        "openai/test_return_token_ids.py",
        "openai/test_return_tokens_as_ids.py",
        "anthropic/test_messages.py",
        "generate/generative_scoring/test_generative_scoring_e2e.py",
        "generate/structured_decisions/test_structured_decisions_e2e.py",
        "scale_out/token_in_token_out/test_serving_tokens.py",
        "scale_out/derender/test_derender_parity.py",
        "serve/instrumentator/test_basic.py",
        "serve/instrumentator/test_orca_metrics.py",
        "serve/middleware/test_optional_middleware.py",
        "serve/sagemaker/test_sagemaker_handler_overrides.py",
        "serve/sagemaker/test_sagemaker_middleware_integration.py",
        "serve/sagemaker/test_sagemaker_stateful_sessions.py",
        "serve/tokenize/test_tokenization.py",
        "pooling/basic/test_truncation.py",
        "pooling/classify/test_online.py",
        "pooling/embed/test_cohere_online.py",
        "pooling/embed/test_online.py",
        "pooling/scoring/test_bi_encoder_online.py",
        "pooling/scoring/test_cross_encoder_online.py",
        "pooling/token_classify/test_online.py",
        "pooling/token_embed/test_online.py",
    )
)
"""Files with tests that need a server and a small model of text. Left out are files that need large models, several
devices or downloaded media, files that start no server, and files about paths that never reach a replica: /metrics,
which is the gateway's own, and the administration of engines."""

_SECURITY = "docs/security.md, What clients cannot set"
_KEYS = "docs/security.md, API keys and tenants"
_OWN = "docs/endpoints.md, Paths that the gateway answers itself"
_REFUSED = "docs/endpoints.md, Paths that go to a replica"
DECISIONS: Final = {
    "*/test_chat_completion.py::test_kv_transfer_prompt_token_ids_*": f"kv_transfer_params is removed ({_SECURITY})",
    "*/test_optional_middleware.py::test_no_request_id_header*": "x-request-id is on every answer (docs/endpoints.md)",
    "*/test_optional_middleware.py::test_*missing_api_token*": f"the gateway checks its own keys ({_KEYS})",
    "*/test_orca_metrics.py::test_*_with_orca_header*": f"endpoint-load-metrics-format is dropped ({_SECURITY})",
    "*/test_sagemaker_stateful_sessions.py::test_*": f"the headers of SageMaker's sessions are dropped ({_SECURITY})",
    "*/test_serving_tokens.py::test_stream_delivers_abort_finish_chunk*": f"abort_requests administers ({_REFUSED})",
    "*/sagemaker/test_sagemaker_*::test_middleware_with_ping_endpoint*": f"/ping is refused ({_REFUSED})",
    "*/sagemaker/test_sagemaker_*::test_middleware_env_var_override*": f"/ping is refused ({_REFUSED})",
    "*/sagemaker/test_sagemaker_*::test_framework_default_handlers*": f"/ping is refused ({_REFUSED})",
    "*/pooling/embed/test_online.py::test_negative_token_ids*": f"the gateway refuses these itself ({_REFUSED})",
    "*/instrumentator/test_basic.py::test_show_version*": f"/version is that of the gateway ({_OWN})",
    "*/instrumentator/test_basic.py::test_server_load*": f"/load is refused, it tells of one engine ({_REFUSED})",
}
"""Patterns of tests that pass directly and not through a gateway, each with its reason."""
