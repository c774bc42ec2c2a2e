"""A rank that calls everything of NCCL that moves data, and prints what came out."""

import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
result: dict[str, object] = {}


def on_gpu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def move(name: str, value: torch.Tensor, collective: Callable[..., object], *arguments: object) -> None:
    collective(value, *arguments)
    result[name] = value.tolist()


split = dist.new_group(list(range(ranks)))  # where this rank has joined
others = range(ranks)
move("all_reduce", on_gpu(1 + rank, 2), dist.all_reduce, dist.ReduceOp.SUM, split)
move("average", on_gpu(1 + rank, 2, dtype=torch.bfloat16), dist.all_reduce, dist.ReduceOp.AVG)
move("broadcast", on_gpu(10 * rank), dist.broadcast, 1)
move("all_gather", torch.empty(ranks, device=device), dist.all_gather_into_tensor, on_gpu(rank))
sums = on_gpu(*(other + rank for other in others))
move("reduce_scatter", torch.empty(1, device=device), dist.reduce_scatter_tensor, sums)
parts = on_gpu(*(10 * rank + other for other in others))
move("all_to_all", torch.empty(ranks, device=device), dist.all_to_all_single, parts)

value = torch.empty(1, device=device)
sends = dist.P2POp(dist.isend, on_gpu(rank), (rank + 1) % ranks)
receives = dist.P2POp(dist.irecv, value, (rank - 1) % ranks)
for work in dist.batch_isend_irecv([sends, receives]):
    work.wait()
result["ring"] = value.tolist()

large = torch.arange(3_000_000, dtype=torch.float32).to(device)  # 12 MB, which takes several rounds
dist.all_reduce(large)
result["large"] = large.cpu()[[0, 1, -1]].tolist()
if rank == 0:
    dist.send(large, 1)
if rank == 1:
    received = torch.empty_like(large)
    dist.recv(received, 0)
    result["received"] = torch.equal(received.cpu(), large.cpu())

objects = [{"rank": rank, "text": "x" * 2000}, None]
dist.broadcast_object_list(objects, 2)
gathered = [None] * ranks
dist.all_gather_object(gathered, "y" * rank)
result["objects"] = [objects[0]["rank"], *gathered]

dist.monitored_barrier(dist.new_group(backend="gloo"))
dist.barrier()
dist.destroy_process_group()
print(json.dumps(result))
