"""The simulated replica: a server that looks like vLLM 0.32 from the outside.

It computes nothing. It keeps a real block-hashed prefix cache, schedules prefill and decode in (scalable) time, and
draws each answer's words from the digest of its prompt, so that equal prompts get equal answers on every replica. If
a request constrains its answer (`response_format`, `structured_outputs`, a forced tool), the answer is a document
that the schema accepts. Answers end at stop strings, log probabilities are made up, and a request that vLLM refuses
is refused. Where to look:

    server         `build_app` and `run`
    call           one HTTP request                  replica          everything that one server owns
    *_api          the endpoints, one module each    errors           vLLM's error answers
    protocol       the fields of requests, checked   fields           reads fields of unchecked JSON
    settings       one replica: its models, cache and speed (rough figures, explained there)

    answers        from a request to its answers     structured       what constrains an answer
    logprobs       log probabilities

    chat_template  from messages to a prompt         images           an image's size and identity
    prompt         tokens, image placeholders and block hashes
    sequence       one prompt and its answer inside an engine
    engine         the step loop, and the wait for a request's tokens
    cache          blocks: hits, LRU eviction, reference counts
    nixl           KV blocks for other servers, and theirs      mooncake       the same by another connector
    pd_role        a role, prefill or decode, that changes while it runs
    offload        vLLM's CPU tier                   sim_lmcache      LMCache's chunks, in CPU memory and in a Redis
    events         vLLM's KV events, and their publisher over ZeroMQ
    metrics        vLLM's metrics                    faults           failures on demand
"""
