"""Federations on real sockets: behind NAT, over slow, stalled and cut links, and without a broker that was killed.

Everything stays on this machine: loopback, and network namespaces with addresses of their own.
"""
