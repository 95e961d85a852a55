"""Where a request goes: through the store while it serves, by a rule all gateways share while it does not."""
