"""The simulated replica: a server that behaves like vLLM 0.32 as far as anyone outside can see.

It computes nothing, but it keeps a real block-hashed prefix cache, schedules prefill and decode in (scalable)
time, and answers every prompt with words drawn from the prompt's digest, so that equal prompts get equal
answers on every replica. Where to look:

    settings       what one replica is: its models, its cache, its speed, which is rough and documented there
    prompt         tokens, image placeholders and block hashes        chat_template  messages to a prompt
    cache          blocks: hits, LRU eviction, reference counts       offload        the CPU tier below it
    lmcache        chunks in CPU memory, instead of that tier         chunk_redis    ... and in a Redis
    events         vLLM's KV events of what happens in both           publisher      ... over ZeroMQ, with replays
    engine         the step loop over all of these                    faults         failures on demand
    generation     one request's sequences and the wait for them      answers        the words and tool calls
    replica        everything one server owns                         call           one HTTP request on it
    *_api          the endpoints, one module per family               openai_stream  the streams of two of them
    metrics        vLLM's metric names                                throughput     ... and two of LMCache's
    server         `build_app` and `run`
"""
