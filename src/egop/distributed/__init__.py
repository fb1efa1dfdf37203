"""Work shared by several processes: collectives, and the shards that FSDP2 makes of parameters.

This package uses nothing else from egop. In a single process it does nothing.
"""

from egop.distributed import processes
from egop.distributed.processes import Holding, agreed, exchanged, owners_of, rank, rows_at, sum_at, world_size
from egop.distributed.sharding import (
    Pieces,
    is_cut_by_rows,
    is_first_shard,
    is_sharded,
    layout,
    like,
    local,
    part_of,
    sum_over_shards,
    whole,
    write,
)

__all__ = [
    "Holding",
    "Pieces",
    "agreed",
    "exchanged",
    "is_cut_by_rows",
    "is_first_shard",
    "is_sharded",
    "layout",
    "like",
    "local",
    "owners_of",
    "part_of",
    "processes",
    "rank",
    "rows_at",
    "sum_at",
    "sum_over_shards",
    "whole",
    "world_size",
    "write",
]
