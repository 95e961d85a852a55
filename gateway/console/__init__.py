"""The console: the whole cluster on one page of each gateway, live. It has no build step, and asks no other origin."""
