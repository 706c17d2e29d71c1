"""The demo: a byte-level model learns a paragraph while two replicas, updated as it learns, recite it.

Everything runs as it would in a cluster, in processes of its own: the manager, two agents with an engine each, two
trainer ranks that shard the model. `task` is what is learnt, `train` one trainer rank, `recital` how replicas are
asked, `stage` the processes, `sites` where they run, `hosts` hosts made of network namespaces, `play` the course of it
all, `show` what is printed.
"""
