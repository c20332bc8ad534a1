"""The only rooms that import zmq: sockets with their options, CURVE, and the event loop's side of both.

Nothing here decides anything. Brokers bind a `Port` for clients and one for brokers and dial each other with a `Line`;
a client has one `Line` a broker.
"""
