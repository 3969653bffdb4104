"""What a run will take, before there is a machine: memory, bytes, FLOPs. Prices the plan that the runtime executes."""

from rowdit.cost.estimate import Estimate, estimate
from rowdit.cost.mesh import RankMesh

__all__ = ["Estimate", "RankMesh", "estimate"]
