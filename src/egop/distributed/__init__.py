"""Several processes at one task: their shares and exchanges, the pieces that FSDP2 makes of parameters, locked folders.

Nothing of egop is used here, and in one process all of it does nothing.
"""

from egop.distributed import processes
from egop.distributed.locks import Lock, claimed, is_forgotten, locked, new_name, remove_if_left_behind
from egop.distributed.processes import Holding, agreed, exchanged, owners_of, rank, rows_at, sum_at, world_size
from egop.distributed.sharding import (
    Pieces,
    below_each_other,
    is_cut_by_rows,
    is_first_shard,
    is_sharded,
    layout,
    like,
    local,
    part_of,
    shards,
    sum_over_shards,
    whole,
    write,
)

__all__ = [
    "Holding",
    "Lock",
    "Pieces",
    "agreed",
    "below_each_other",
    "claimed",
    "exchanged",
    "is_cut_by_rows",
    "is_first_shard",
    "is_forgotten",
    "is_sharded",
    "layout",
    "like",
    "local",
    "locked",
    "new_name",
    "owners_of",
    "part_of",
    "processes",
    "rank",
    "remove_if_left_behind",
    "rows_at",
    "shards",
    "sum_at",
    "sum_over_shards",
    "whole",
    "world_size",
    "write",
]
