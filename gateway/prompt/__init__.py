"""From a request body to its chain of prefix keys: the identity of a prompt, without tokenising it.

- *prompt stream*: the canonical bytes of a prompt (`stream.py`; the format is in docs/adr/0001-prompt-stream.md).
- *boundary*: an offset in it; *prefix key*: the BLAKE3 of the stream up to a boundary; *chain*: a
  request's keys, shallow to deep; *tip*: the deepest.

`read_prompt` picks the reader of an API (`chat.py`, `plain.py`, and by way of `turns.py` `responses.py`
and `anthropic.py`); readers write through a `PromptWriter` to a `PromptStream`. Nothing here does I/O.
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
