"""Two processes train one model with DistributedDataParallel over Gloo: spawned, or started as ranks by a small launcher."""
import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo import Recorder, seed_everything

VARIANTS = [["spawn"], ["ranks"]]


def rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seed_everything(45)
    model = nn.Sequential(nn.Linear(64, 96), *(layer for _ in range(6) for layer in (nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.LayerNorm(96), nn.Tanh())),
                          nn.Linear(96, 16))
    model = DistributedDataParallel(model, bucket_cap_mb=0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rec = Recorder(["", "--digest", f"{folder}/rank{rank}.json"])
    torch.manual_seed(100 + rank)
    for step in range(4):
        x, labels = torch.randn(768, 64), torch.randint(0, 16, (768,))
        optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                F.cross_entropy(model(x * 0.5), labels).backward()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        gathered = [torch.empty_like(x[:4]) for _ in range(2)]
        dist.all_gather(gathered, x[:4].contiguous())
        rec.add(step, "loss", total)
        rec.add(step, "gathered", torch.stack(gathered))
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.finish()
    dist.destroy_process_group()


def main():
    rec = Recorder(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        if rec.args == ["ranks"]:
            ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__)], env=dict(os.environ, RANK=str(rank), ZOO_RANK_FOLDER=folder))
                     for rank in range(2)]
            if any([rank.wait() != 0 for rank in ranks]):
                raise SystemExit("a rank failed")
        else:
            mp.spawn(rank_main, args=(folder,), nprocs=2)
        for rank in range(2):
            with open(os.path.join(folder, f"rank{rank}.json")) as file:
                result = json.load(file)
            rec.merge(f"rank{rank}", result["entries"])
            rec.most_fixed = max(rec.most_fixed, result["fixed_bytes"])
    rec.finish()


if __name__ == "__main__":
    if "ZOO_RANK_FOLDER" in os.environ:
        rank_main(int(os.environ["RANK"]), os.environ["ZOO_RANK_FOLDER"])
    else:
        main()
