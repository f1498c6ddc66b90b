#!/usr/bin/env python3
"""`memfit train` and `memfit export` on what export.py left: Python's bits, resuming, limits, refusals by name.

    test_train.py MEMFIT FOLDER
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "train"))
import tensors
import zoo


def memfit(*words, status=0):
    done = subprocess.run([sys.argv[1], *map(str, words)], capture_output=True, text=True)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def refused(status, text, *words):
    out = memfit("train", *words, status=status)
    assert text in out, (text, out)


def losses(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all({"step", "epoch", "loss", "lr", "grad_norm", "seconds", "peak_bytes"} <= line.keys() for line in lines)
    return [line["loss"] for line in lines], max(line["peak_bytes"] for line in lines)


def python_run(name, x, y, batch, epochs):
    torch.manual_seed(0)
    model = zoo.MODELS[name][0]().train()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    said = []
    for _ in range(epochs):
        for begin in range(0, len(x), batch):
            loss = F.cross_entropy(model(x[begin:begin + batch].clone()), y[begin:begin + batch].clone())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            said.append(loss.item())
    return said, model.state_dict()


def check_parity(folder, work, name, inputs):
    torch.manual_seed(9)
    x, y = inputs(52), torch.randint(0, 4, (52,))
    data = work / f"{name}.npz"
    numpy.savez(data, x=x.numpy(), label=y.numpy().astype("uint8"))
    wanted, state = python_run(name, x, y, 8, 3)
    common = ["--model", folder / f"{name}.dynamic.train.pt2", "--data", data, "--loss", "cross_entropy", "--optimizer", "adamw,lr=1e-2", "--batch", 8,
              "--no-shuffle", "--seed", 3]
    memfit("train", *common, "--epochs", 3, "--checkpoints", work / f"{name}.ckpt", "--log", work / f"{name}.jsonl")
    got, peak = losses(work / f"{name}.jsonl")
    assert got == wanted, (name, got, wanted)
    out = work / f"{name}.safetensors"
    memfit("export", work / f"{name}.ckpt", "-o", out)
    exported = tensors.read(out)
    assert exported.keys() == state.keys() and all(torch.equal(exported[key], state[key]) for key in state), name
    memfit("export", work / f"{name}.ckpt", "-o", out, status=2)
    # Gone on from in the middle of an epoch, with other threads.
    memfit("train", *common, "--steps", 10, "--checkpoints", work / f"{name}.two", "--log", work / f"{name}.two.jsonl")
    memfit("train", *common, "--steps", 21, "--checkpoints", work / f"{name}.two", "--log", work / f"{name}.two.jsonl", "--threads", 0)
    assert losses(work / f"{name}.two.jsonl")[0] == wanted
    refused(2, "batch was 8 and is 4", *common[:-5], "--batch", 4, "--no-shuffle", "--seed", 3, "--checkpoints", work / f"{name}.two")
    return common


def main():
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        common = check_parity(folder, work, "cnn", lambda n: torch.randn(n, 3, 8, 8))
        check_parity(folder, work, "mlp", lambda n: torch.randn(n, 10))
        assert "activations" in memfit("train", *common, "--dry-run", "--checkpoints", work / "dry") and not (work / "dry").exists()
        config = work / "run.json"
        config.write_text(json.dumps({"model": str(folder / "cnn.dynamic.train.pt2"), "data": str(work / "cnn.npz"), "loss": "cross_entropy", "optimizer": "adamw,lr=1e-2",
                                      "batch": 8, "no-shuffle": True, "seed": 3, "epochs": 3}))
        memfit("train", "--config", config, "--log", work / "config.jsonl")
        assert losses(work / "config.jsonl")[0] == losses(work / "cnn.jsonl")[0]
        toml = work / "run.toml"
        toml.write_text(f'model = "{folder}/cnn.dynamic.train.pt2"\ndata = "{work}/cnn.npz"\nloss = "cross_entropy"\noptimizer = "adamw,lr=1e-2"\nbatch = 8\n'
                        "no-shuffle = true\nseed = 3\nepochs = 1\n")
        memfit("train", "--config", toml, "--epochs", 3, "--log", work / "toml.jsonl")
        assert losses(work / "toml.jsonl")[0] == losses(work / "cnn.jsonl")[0]
        toml.write_text('modle = "x"\n')
        refused(2, "Did you mean model?", "--config", toml)
        out = memfit("train", *common, "--eval-model", folder / "cnn.dynamic.eval.pt2", "--validate", work / "cnn.npz", "--metric", "accuracy", "--metric", "topk,k=2")
        assert "accuracy" in out and "top2" in out and "validation loss" in out, out

        # Under 40 % of its own peak, where nothing is split: the same losses.
        numpy.savez(work / "many.npz", x=torch.randn(2048, 3, 8, 8).numpy(), y=torch.randint(0, 4, (2048,)).numpy())
        big = ["--model", folder / "resnet.dynamic.train.pt2", "--data", work / "many.npz", "--loss", "cross_entropy", "--batch", 512, "--epochs", 2]
        memfit("train", *big, "--log", work / "plain.jsonl")
        plain, peak = losses(work / "plain.jsonl")
        memfit("train", *big, "--log", work / "limited.jsonl", "--memory", f"{peak * 2 // 5}B")
        limited, below = losses(work / "limited.jsonl")
        assert limited == plain and below <= peak * 2 // 5, (below, peak)

        refused(2, "Did you mean cross_entropy?", *common[:4], "--loss", "cros_entropy")
        refused(2, "Did you mean label?", *common, "--target", "labels")
        refused(2, "--eval-model", *common, "--validate", work / "cnn.npz")
        refused(2, "baked into", "--model", folder / "cnn.static.train.pt2", *common[2:6], "--batch", 6)
        numpy.savez(work / "far.npz", x=numpy.zeros((8, 3, 8, 8), "float32"), label=numpy.array([0, 1, 2, 3, 0, 4, 1, 1]))
        refused(4, "Row 5 of", *common[:2], "--data", work / "far.npz", "--loss", "cross_entropy", "--batch", 4, "--no-shuffle")
        numpy.savez(work / "double.npz", x=numpy.zeros((8, 3, 8, 8)), label=numpy.zeros(8, int))
        refused(2, 'x.astype("float32")', *common[:2], "--data", work / "double.npz", "--loss", "cross_entropy")
        (work / "cut.npz").write_bytes((work / "cnn.npz").read_bytes()[:1000])
        refused(4, "cut.npz", *common[:2], "--data", work / "cut.npz", "--loss", "cross_entropy")
        print("memfit train has Python's bits, goes on where it ended, and refuses by name")


if __name__ == "__main__":
    main()
