"""The client: the program that trains a recipe on somebody's machine and takes part in a federation.

Here belongs what only a client does: training and data (`trainer`, `feed`), the session as a plain state machine
(`session`), and the shell of sockets, threads and terminal around both. Nothing here imports `brokers`.
"""
