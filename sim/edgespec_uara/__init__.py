"""User association and resource allocation (UARA) for speculative decoding at the edge.

Which device uses which server, with which share of its bandwidth and compute: the problem of Koh
and Yang (arXiv 2511.01695), its method, and the baselines that show what the method is worth.
"""
