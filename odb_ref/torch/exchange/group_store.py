"""The store of a process group, which torch has no public name for before 2.9: all that is done for earlier ones."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


def get_group_store(group: dist.ProcessGroup) -> Store:
    """Returns the store by which the ranks of the group met."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    return store
