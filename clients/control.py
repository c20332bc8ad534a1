"""SCAFFOLD on the client: what its local steps are corrected by, and how its own control follows its contributions.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning" (2020). Controls are in units of
a local step, as `ravnest_fed.aggregation.outer.Scaffold` says; a client's own is zero until a commit counts it.
"""

import numpy as np

from clients.residual import PutBlob, ReadBlob, Standing
from ravnest_fed.errors import LedgerError
from ravnest_fed.facts import BlobRef
from ravnest_fed.parameters import Float32, Schema, Shard


class Controls:
    """The client's own control beside the federation's, `common` (float32, a value for each parameter, padded).

    `lost` names the shards whose own control could not be read, and is zeros from now on.
    """

    def __init__(self, schema: Schema, standing: Standing, common: Float32, read: ReadBlob) -> None:
        self.lost: list[int] = []
        self._schema = schema
        self._common = common
        self._own = np.zeros(schema.parameter_stop, np.float32)
        shards = [shard for shard in schema.shards if shard.kind == "parameters"]
        for shard, ref in zip(shards, standing.control, strict=False):
            try:
                values = np.frombuffer(read(ref.hash), "<f4")
                if values.size != shard.count:
                    raise LedgerError(f"the control of shard {shard.index} has {values.size} values, not {shard.count}")
            except LedgerError:
                self.lost.append(shard.index)
                continue
            self._own[shard.start : shard.stop] = values

    def correction(self) -> Float32:
        """What each local step adds to the parameters: own control - common control."""
        return self._own - self._common

    def renewal(self, put: PutBlob) -> "Renewal":
        """Takes up what one contribution says of this client's steps."""
        return Renewal(self._schema, self.correction(), put)


class Renewal:
    """The client's control after a contribution, as its decoded deltas a step have it. A `Feedback` that adds nothing.

    `renewed` grows by a blob for each shard of parameters.
    """

    def __init__(self, schema: Schema, correction: Float32, put: PutBlob) -> None:
        self.renewed: list[BlobRef] = []
        self._schema = schema
        self._correction = correction
        self._put = put

    def wanted(self, shard: Shard, delta: Float32) -> Float32:
        """The delta as it is."""
        return delta

    def sent(self, shard: Shard, wanted: Float32, decoded: Float32) -> None:
        """control = delta a step + own control - common control: what the steps were without their correction."""
        control = decoded + self._correction[shard.start : shard.stop]
        control[max(0, self._schema.parameter_count - shard.start) :] = 0
        self.renewed.append(self._put(control.astype("<f4").tobytes()).bare())
