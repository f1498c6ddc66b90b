"""A model trains; then several threads share it for inference while handing tensors to each other through a queue."""
import queue
import sys
import threading

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, digest_of, seed_everything


def serve(model, inputs, outputs):
    with torch.inference_mode():
        while True:
            item = inputs.get()
            if item is None:
                return
            index, x = item
            outputs[index] = model(x)


def main():
    rec = Recorder(sys.argv)
    seed_everything(43)
    model = nn.Sequential(nn.Linear(96, 96), nn.GELU(), *(layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.LayerNorm(96), nn.Tanh())), nn.Linear(96, 96))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(1024, 96)
        hidden = model[:3](x)  # made here, used after the threads are done
        work, results = queue.Queue(), {}
        threads = [threading.Thread(target=serve, args=(model, work, results)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for index in range(9):
            work.put((index, x[index * 64:(index + 3) * 64] + index))
        for _ in threads:
            work.put(None)
        for thread in threads:
            thread.join()
        loss = F.mse_loss(model[3:](hidden), x) + sum(results[i].mean() for i in range(9)) * 0.01
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "served", [digest_of(results[i]) for i in range(9)])
        rec.module(step, model)
        rec.fixed_bytes(model, x)
        optimizer.step()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
