"""The simulated replica: a server that behaves like vLLM 0.32 as far as anyone outside can see.

It computes nothing, but it keeps a real block-hashed prefix cache, schedules prefill and decode in (scalable)
time, and answers every prompt with words drawn from the prompt's digest, so that equal prompts get equal
answers on every replica. Where a request constrains its answer (`response_format`, `structured_outputs`, a forced
tool), the answer is a document that the schema accepts; it ends at stop strings; log probabilities are made up; what
vLLM refuses is refused in vLLM's words. Where to look:

    settings       what one replica is: its models, its cache, its speed, which is rough and documented there
    prompt         tokens, image placeholders and block hashes        chat_template  messages to a prompt
    cache          blocks: hits, LRU eviction, reference counts       offload        the CPU tier below it
    lmcache        chunks in CPU memory, instead of that tier         chunk_redis    ... and in a Redis
    events         vLLM's KV events of what happens in both           publisher      ... over ZeroMQ, with replays
    engine         the step loop over all of these                    faults         failures on demand
    generation     one request's sequences and the wait for them      words          its vocabulary
    planning       from a request to its answers                      answers        the words and tool calls
    structured     what constrains an answer                          stopping       where it ends
    json_schema    a document that a schema accepts                   schema_merge   two schemas as one
    json_scalars   its numbers and strings                            pattern        a text for an expression
    logprobs       log probabilities                                  sampling       the ranges of parameters
    protocol       the fields of requests                             validation     bodies held against them
    replica        everything one server owns                         call           one HTTP request on it
    *_api          the endpoints, one module per family               openai_stream  the streams of two of them
    metrics        vLLM's metric names                                throughput     ... and two of LMCache's
    server         `build_app` and `run`
"""
