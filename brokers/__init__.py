"""The broker: a program that people run on reachable hosts, several to a federation, none of them a master.

Here belongs what only a broker does: the round and agreement as plain state machines (`core` and what it holds), the
calculations behind them (`workbench`), and the shell of sockets, disk and clock (`server`, `command`). Nothing here
imports torch or `clients`.
"""
