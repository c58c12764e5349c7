import torch.distributed as dist


class Ranks:
    """Those that share an engine: neighbours."""

    def __init__(self, size):
        rank, self.size = dist.get_rank(), size
        starts = range(0, dist.get_world_size(), size)
        groups = {start: dist.new_group(list(range(start, start + size))) for start in starts}
        self.group, self.rank_in_group = groups[rank - rank % size], rank % size

    def broadcast_object(self, x=None):
        objects = [x]
        dist.broadcast_object_list(objects, group=self.group, group_src=0)
        return objects[0]


def get_tp_group():
    from . import LLM

    return Ranks(LLM.engines[-1].flags["tensor_parallel_size"])
