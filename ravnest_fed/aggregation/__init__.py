"""From contributions to an update, and from an update to the next model, with the same bits on every machine.

Here belong exact sums and norms, the weight of a contribution, the reduction of a shard, and the outer optimisers. All
of it is arithmetic on values and integers: no messages, no files, no torch.
"""
