"""HTTP/1.1 towards engines, where microseconds count: the gateway at each token, an agent in each pause.

Decides when a connection is used again, and which error stands for a failed answer. Does not decide what is asked.
"""
