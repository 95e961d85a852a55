"""One pool of replicas in the shared state: placing, ownership, and what answers teach."""
