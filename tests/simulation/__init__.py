"""The simulator: real decision cores of brokers and clients, on a simulated network, clock and disk, from one seed.

`world` holds the event heap and the network, `brokers` and `clients` the shells of the nodes, `faults` what goes wrong and
when, `invariants` what must hold all the same, `running` a whole run. `python -m tests.simulation --help` runs ranges of
seeds.
"""
