"""ravnest-fed: train one PyTorch model together on machines you own.

Here belongs what every node must agree on: messages, identities, the federation file, codecs, exact aggregation, the
replicated log, and the commands of operators. Brokers and clients are packages of their own that import this one; it
imports neither, and nothing here needs torch but `model_state` and `founding`.

A recipe needs `Recipe` and `Partition` alone.
"""

from ravnest_fed.partition import Partition
from ravnest_fed.recipe import Recipe

__all__ = ["Partition", "Recipe"]
