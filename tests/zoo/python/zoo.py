"""What every zoo program shares: a recorder that turns a run into digests that two runs can be compared by.

Not here: anything about memory limits. A zoo program is an ordinary training script; the runner decides how it is run.
Each entry is (step, name, SHA-256 over dtype, shape and bytes). The recorder copies a tensor before it looks at its
bytes, so that looking never makes the program hold a raw pointer into its own tensors.
"""
import hashlib
import json
import os
import random
import sys
import tempfile

import numpy
import torch


def seed_everything(seed):
    # MKL's vector math sets itself up on its first call; when two threads make that call at once, one may answer in
    # low accuracy (seen in about one run of five, plain PyTorch). One small call first makes runs comparable.
    torch.sin(torch.zeros(8))
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _dense_digest(hasher, tensor):
    copy = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    hasher.update(f"{copy.dtype} {tuple(copy.shape)} ".encode())
    if copy.numel() > 0:
        hasher.update(copy.reshape(-1).view(torch.uint8).numpy())


def digest_of(value):
    """SHA-256 of a tensor of any layout, or of the text form of anything else."""
    hasher = hashlib.sha256()
    if not isinstance(value, torch.Tensor):
        hasher.update(repr(value).encode())
    elif value.is_meta:
        hasher.update(f"meta {value.dtype} {tuple(value.shape)}".encode())
    elif value.is_nested:
        for part in value.detach().unbind():
            _dense_digest(hasher, part)
    elif value.layout == torch.sparse_coo:
        whole = value.detach().coalesce()
        hasher.update(f"coo {tuple(whole.shape)} ".encode())
        _dense_digest(hasher, whole.indices())
        _dense_digest(hasher, whole.values())
    elif value.layout == torch.sparse_csr:
        for part in (value.detach().crow_indices(), value.detach().col_indices(), value.detach().values()):
            _dense_digest(hasher, part)
    elif value.is_quantized:
        hasher.update(f"{value.q_scale()} {value.q_zero_point()} ".encode())
        _dense_digest(hasher, value.int_repr())
    else:
        _dense_digest(hasher, value)
    return hasher.hexdigest()


def _tensors_in(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    elif isinstance(thing, torch.nn.Module):
        for tensor in list(thing.parameters()) + list(thing.buffers()):
            yield from _tensors_in(tensor)
    elif isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            for tensor in group["params"]:
                yield from _tensors_in(tensor)
        yield from _tensors_in(list(thing.state.values()))
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from _tensors_in(part)
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _tensors_in(part)


def _storage_bytes(tensor):
    if tensor.layout == torch.sparse_coo:
        yield from _storage_bytes(tensor._indices())
        yield from _storage_bytes(tensor._values())
    elif tensor.layout == torch.sparse_csr:
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from _storage_bytes(part)
    elif tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        yield storage._cdata, storage.nbytes()


class Recorder:
    """Collects digests and writes them to the file that --digest names, at finish()."""

    def __init__(self, argv):
        self.args = []
        self.path = None
        words = iter(argv[1:])
        for word in words:
            if word == "--digest":
                self.path = next(words)
            else:
                self.args.append(word)
        self.entries = []
        self.most_fixed = 0
        self.out_of_memory = 0

    def add(self, step, name, value):
        self.entries.append([step, name, digest_of(value)])

    def module(self, step, model, name="model"):
        for key, parameter in model.named_parameters():
            self.add(step, f"{name}.{key}", parameter)
            if parameter.grad is not None:
                self.add(step, f"{name}.{key}.grad", parameter.grad)
        for key, buffer in model.named_buffers():
            self.add(step, f"{name}.{key}", buffer)

    def optimizer(self, step, optimizer, name="optimizer"):
        index = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    for part in value if isinstance(value, (list, tuple)) else [value]:
                        self.add(step, f"{name}.{index}.{key}", part)
                index += 1

    def generators(self, step, **own):
        self.add(step, "generator.default", torch.get_rng_state())
        for key, generator in own.items():
            self.add(step, f"generator.{key}", generator.get_state())

    def fixed_bytes(self, *things):
        """Bytes of what the step cannot do without: parameters, gradients, optimizer state, inputs."""
        seen = {}
        for tensor in _tensors_in(things):
            seen.update(_storage_bytes(tensor))
        self.most_fixed = max(self.most_fixed, sum(seen.values()))

    def caught_out_of_memory(self):
        self.out_of_memory += 1

    def merge(self, name, entries):
        """Take in entries that another process recorded."""
        self.entries += [[step, f"{name}.{key}", digest] for step, key, digest in entries]

    def finish(self):
        if self.path is None:
            for step, name, digest in self.entries:
                print(step, name, digest[:16])
            return
        with open("/proc/self/status") as status:
            highest = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        result = {"hwm_bytes": highest, "torch_version": torch.__version__, "fixed_bytes": self.most_fixed,
                  "out_of_memory_caught": self.out_of_memory, "entries": self.entries}
        folder = os.path.dirname(os.path.abspath(self.path))
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump(result, file)
        os.replace(file.name, self.path)
        sys.stdout.flush()
