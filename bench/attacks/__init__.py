"""What hostile clients and lying replicas cost a gateway, and the honest client beside them.

__main__     options, one attack after the other, the table
table        every attack, with the sentence that describes it
forms, images, documents, connections, answers, faults    what the attacks do, by kind
target       what is attacked, and how it is asked
replicas     replicas that lie when a prompt says so (a process)
arena        a gateway of its own before them, a fresh one after one that was harmed
witness      /health, memory and the honest client while an attack runs (a process)
measure      one attack, watched; row: what was found, held against the goals
compare      two runs side by side, as docs/security.md shows them
"""
