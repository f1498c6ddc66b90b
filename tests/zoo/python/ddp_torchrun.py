"""Two ranks started by torchrun: DDP with BatchNorm, gradient accumulation and static buckets as views."""
import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo import Recorder, seed_everything


def rank_main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    seed_everything(46)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(layer for _ in range(5) for layer in (nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))),
                        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rec = Recorder(["", "--digest", f"{folder}/rank{rank}.json"])
    torch.manual_seed(rank)
    for step in range(3):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        dist.broadcast(net[-1].bias.data, src=0)
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.finish()
    dist.destroy_process_group()


def main():
    rec = Recorder(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", os.path.abspath(__file__)],
                       env=dict(os.environ, ZOO_RANK_FOLDER=folder), check=True)
        for rank in range(2):
            with open(os.path.join(folder, f"rank{rank}.json")) as file:
                result = json.load(file)
            rec.merge(f"rank{rank}", result["entries"])
            rec.most_fixed = max(rec.most_fixed, result["fixed_bytes"])
    rec.finish()


if __name__ == "__main__":
    if "ZOO_RANK_FOLDER" in os.environ:
        rank_main(os.environ["ZOO_RANK_FOLDER"])
    else:
        main()
