"""User association and resource allocation (UARA) for speculative decoding at the edge.

The problem is to assign each device to a server, with a share of its bandwidth and compute. This
package contains the problem of Koh and Yang (arXiv 2511.01695), their method, and baselines that
show the method's benefit.
"""
