"""Chooses a request's replica. The store chooses while it serves; otherwise all gateways use the same rule.

A request can wait in five places, each for something else. In holds.py it waits until any replica of its model is
ready: there is no pool yet that could queue it. In the store's queue (coordinator/pool/seats.py) it waits for room on a
replica, in one order for all gateways. In local_queue.py it does the same while the store is away, with this gateway's
share of the room and of the queue. These three have one bound, and bands go first in each.

Before, a large body waits until a worker has memory to read it, when nobody knows yet what the request asks for
(gateway/request/fairness.py). And a placement waits for some ms until Redis has answered earlier ones
(coordinator/pool/placing_window.py).
"""
