"""From a request body to its chain of prefix keys: the identity of a prompt, without tokenising it.

- *prompt stream*: the canonical bytes of a prompt. docs/adr/0001-prompt-stream.md describes the format.
- *boundary*: an offset in the stream at which a key ends.
- *prefix key*: the BLAKE3 of the stream up to a boundary. Requests that share a beginning share its keys.
- *chain*: a request's keys, shallow to deep. The deepest is the *tip*.

`read_prompt` (`read`) picks the reader of an API, and the reader writes the stream:

    chat, plain           readers of OpenAI's chat messages, and of prompts without messages
    responses, anthropic  readers of APIs whose input vLLM translates to chat messages (`turns`)
    root                  what comes before the messages: model, tenant, options, tools
    parts, images         content parts of a message; the digest and size of an image (`image_size`)
    fields                JSON values as bytes
    writer                messages and parts as tokens of the stream
    stream                the bytes, their hash and the keys
    prompt                the result
    steps                 a bound on the work of one request
    token_estimator       how many tokens a prompt has

Nothing here does I/O.
"""

from gateway.prompt.prompt import ImageSize, Prompt, PromptLimits
from gateway.prompt.read import read_prompt
from gateway.prompt.root import CacheScope
from gateway.prompt.steps import Steps, TooManySteps
from gateway.prompt.token_estimator import TokenEstimator

__all__ = [
    "CacheScope",
    "ImageSize",
    "Prompt",
    "PromptLimits",
    "Steps",
    "TokenEstimator",
    "TooManySteps",
    "read_prompt",
]
