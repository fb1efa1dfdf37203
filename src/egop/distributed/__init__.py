"""Several processes: collectives that do not hang when one fails, and parameters sharded by FSDP2.

This package uses nothing else from egop. In a single process it does nothing.
"""

from egop.distributed import processes
from egop.distributed.sharding import (
    LocalShards,
    has_first_shard,
    is_sharded,
    is_sharded_by_rows,
    shard_like,
    sharding_layout,
    sum_over_shards,
    take_shard,
    to_full,
    to_local,
    to_local_parts,
    write_shard,
)

__all__ = [
    "LocalShards",
    "has_first_shard",
    "is_sharded",
    "is_sharded_by_rows",
    "processes",
    "shard_like",
    "sharding_layout",
    "sum_over_shards",
    "take_shard",
    "to_full",
    "to_local",
    "to_local_parts",
    "write_shard",
]
