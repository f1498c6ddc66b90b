"""One model run one way (eager, checkpoint or compile), a step at a time: worker.py MODEL WAY.

Says {"ready": true} when the model stands. Then each line "step" on standard input is answered by one JSON line on standard output: ms of
forward, loss and backward, the loss's bits, and digests of the gradients and of the net's buffers, which are taken outside the time.
Ends at the end of its input. Whatever else prints goes to standard error.
"""
import hashlib
import json
import os
import struct
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402

import models  # noqa: E402


def digest(tensors):
    # Of copies: a tensor whose numpy() is out may not be moved, and that would change what is measured.
    sha = hashlib.sha256()
    for tensor in tensors:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        sha.update(memoryview(copy.reshape(-1).view(torch.uint8).numpy()))
    return sha.hexdigest()[:16]


def answer(values):
    print(json.dumps(values), file=answers, flush=True)


def step(case, parameters):
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    start = time.perf_counter()
    loss = case.loss()
    loss.backward()
    took = time.perf_counter() - start
    return {"ms": took * 1e3, "loss": struct.pack("<f", loss.item()).hex(),
            "gradients": digest(parameter.grad for parameter in parameters), "buffers": digest(case.net.buffers())}


def main():
    name, way = sys.argv[1:]
    case = models.make(name, checkpointed=way == "checkpoint")
    if way == "compile":
        import torch._functorch.config
        torch._functorch.config.activation_memory_budget = 0.5
        case.forward = torch.compile(case.net)
    parameters = list(case.net.parameters())
    answer({"ready": True})
    for line in sys.stdin:
        if line.strip() != "step":
            raise SystemExit(f"unknown command {line.strip()!r}; there is 'step'")
        answer(step(case, parameters))


main()
