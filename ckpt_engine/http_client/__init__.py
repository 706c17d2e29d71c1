"""HTTP/1.1 towards engines, where microseconds count: the gateway at each token, an agent in each pause.

Decides when a connection is used again and how an answer that is none is told; not what is asked, nor what follows.
"""
