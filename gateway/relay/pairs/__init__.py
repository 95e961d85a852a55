"""How the KV cache of a prompt gets from the replica that computes it to the one that decodes.

One file for each protocol of `pairs.protocol`, behind one interface. prefill_legs.py runs the legs of all of them.

    protocol     the interface: what a leg is asked, what its answer says, what is waited for
    nixl         vLLM's NixlConnector
    store        LMCache's remote tier        store_waits  waits until a prompt is there
    mooncake     vLLM's MooncakeConnector     bootstraps   which engine a replica is, for that
    recent_legs  what became of each replica's last legs, for /ready and the doctor
"""
