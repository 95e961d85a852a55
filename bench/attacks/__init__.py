"""How hostile clients and lying replicas affect a gateway and its honest clients.

__main__     command line: runs the attacks one after another, prints the table
table        every attack by name, with a sentence that describes it
forms, images, documents, connections, answers, faults    the attacks, by kind
target       the attacked gateway, and a client that can send broken HTTP
replicas     replicas that lie when a prompt asks for it (a separate process)
arena        starts a gateway in front of these replicas, and a fresh one after an attack harmed it
witness      watches /health, memory and an honest client during an attack (a separate process)
measure      runs one attack and watches it; row: the result and the goals that it missed
"""
