"""Run by two processes: what kfacpack does with parameters that are divided between them. Prints errors as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from toys import ToyTask, toy_model

import kfacpack as kp


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def errors(use) -> str:
    try:
        use()
    except kp.KfacpackError as error:
        return str(error)
    return "no error"


def main() -> None:
    dist.init_process_group("gloo")
    try:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        sharded, trained = network(), toy_model(dtype=torch.float32)
        fully_shard(sharded, mesh=mesh)
        fully_shard(trained.module, mesh=mesh)
        wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
        batches = [torch.ones(4, 4)]
        found = {
            "estimate": errors(lambda: kp.estimate(sharded, batches)),
            "linearize": errors(lambda: kp.linearize(sharded, "0.weight")),
            "train": errors(lambda: kp.train(trained, ToyTask(), steps=1)),
            "estimate_task": errors(lambda: kp.estimate_task(trained, ToyTask(), examples=4)),
            "wrapped": errors(lambda: kp.estimate(wrapped, batches)),
        }
        # Data parallelism is the supported way: all processes pass the whole model and the same batches.
        whole = kp.estimate(network(), torch.arange(32.0).view(8, 4).split(2), fisher="exact")
        tau = {name: torch.ones(shape) for name, shape in ((p.name, p.shape) for p in whole.about.base.parameters)}
        found["quadratic"] = float(whole.quadratic(tau))
        sys.stdout.write(json.dumps(found))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
