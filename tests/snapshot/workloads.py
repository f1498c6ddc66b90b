"""Programs of allocation requests, as training jobs make them, with stacks. A program runs on any allocator settings."""
from __future__ import annotations

import random

from oracle_allocator import GIB, KIB, MIB, Allocator, Device, OutOfMemory, Settings
from snapshot_writer import PYTHON_TAIL, Stacks

SITE = "/opt/conda/lib/python3.11/site-packages/torch"


class Program:
    """Collects requests: alloc, free, empty_cache, end_pool. Ids are the program's own."""

    def __init__(self, deep=False):
        self.ops = []
        self.stacks = Stacks()
        self.next_id = 0
        self.deep = deep

    def stack(self, *parts):
        tail = PYTHON_TAIL * 6 if self.deep else []
        return self.stacks.make(*parts, *tail)

    def alloc(self, size, stack, stream=0, pool=(0, 0)):
        self.next_id += 1
        self.ops.append(("alloc", self.next_id, int(size), stack, stream, pool))
        return self.next_id

    def free(self, ident, stack=None, delay=0):
        self.ops.append(("free", ident, stack, delay))

    def empty_cache(self):
        self.ops.append(("empty",))

    def others(self, size):
        """From here other processes hold so much of the device."""
        self.ops.append(("others", size))

    def start_recording(self):
        self.ops.append(("forget",))

    def end_pool(self, pool):
        self.ops.append(("end_pool", pool))


def run(program, allocator, on_oom="stop", rng=None):
    """Returns the index of the op that ran out of memory, or None."""
    live = {}
    failed = None
    for n, op in enumerate(program.ops):
        if op[0] == "alloc":
            _, ident, size, stack, stream, pool = op
            try:
                live[ident] = allocator.malloc(size, stream, stack, pool)
            except OutOfMemory:
                failed = n if failed is None else failed
                if on_oom == "stop":
                    return failed
                for i in sorted(live)[len(live) // 2:]:
                    allocator.free(live.pop(i))
        elif op[0] == "free":
            _, ident, stack, delay = op
            if ident in live:
                allocator.free(live.pop(ident), stack, delay)
        elif op[0] == "empty":
            allocator.empty_cache()
        elif op[0] == "end_pool":
            allocator.end_pool(op[1])
        elif op[0] == "others":
            allocator.dev.others = op[1]
        elif op[0] == "forget":  # recording starts here
            allocator.events.clear()
            allocator.reserved_after.clear()
            for seg in allocator.segs:
                seg.stack = None
                for blk in seg.blocks:
                    blk.stack = None
    return failed


def param_stack(p, i):
    return p.stack(f"{SITE}/nn/modules/module.py:1012:convert", f"{SITE}/nn/modules/module.py:{900 + i % 7}:_apply",
                   "/home/me/train.py:21:build_model", "/home/me/train.py:90:main")


def forward_stack(p, i):
    return p.stack(f"{SITE}/nn/functional.py:{2000 + i % 5}:linear", f"{SITE}/nn/modules/linear.py:125:forward",
                   *PYTHON_TAIL, f"/home/me/model.py:{40 + i}:forward", *PYTHON_TAIL, "/home/me/train.py:50:train_step",
                   "/home/me/train.py:92:main")


def backward_stack(p, i=0):
    return p.stack(f"{SITE}/autograd/graph.py:824:_engine_run_backward", f"{SITE}/autograd/__init__.py:347:backward",
                   f"{SITE}/_tensor.py:626:backward", "/home/me/train.py:52:train_step", "/home/me/train.py:92:main")


def optimizer_state_stack(p):
    return p.stack(f"{SITE}/optim/adam.py:180:_init_group", f"{SITE}/optim/adam.py:232:step",
                   f"{SITE}/optim/optimizer.py:493:wrapper", "/home/me/train.py:53:train_step", "/home/me/train.py:92:main")


def optimizer_temp_stack(p):
    return p.stack(f"{SITE}/optim/adam.py:620:_multi_tensor_adam", f"{SITE}/optim/adam.py:784:adam",
                   f"{SITE}/optim/adam.py:244:step", f"{SITE}/optim/optimizer.py:493:wrapper",
                   "/home/me/train.py:53:train_step", "/home/me/train.py:92:main")


def loss_stack(p):
    return p.stack(f"{SITE}/nn/functional.py:3100:cross_entropy", f"{SITE}/nn/modules/loss.py:1293:forward", *PYTHON_TAIL,
                   "/home/me/train.py:51:train_step", "/home/me/train.py:92:main")


def training(steps=5, layers=8, width=4 * MIB, batch=lambda step: 8, act=1 * MIB, streams=False, rng=None, leak=0,
             spike=0, deep=False, empty_every=0, fwd_temps=3, weird=False, keep_grads=False, comm_stream=0):
    """A training loop: weights once, per step activations, gradients and an Adam step."""
    rng = rng or random.Random(0)
    p = Program(deep)
    params = [p.alloc(width + (i % 3) * 256 * KIB, param_stack(p, i)) for i in range(layers)]
    states = []
    grads = []
    for step in range(steps):
        b = batch(step)
        acts = []
        for i in range(layers):
            for k in range(fwd_temps):
                t = p.alloc(max(1, int(act * b / 8 / (k + 2))) + rng.choice([0, 0, 300, 4096]), forward_stack(p, i))
                if k:
                    p.free(t)
                else:
                    acts.append(t)
            acts.append(p.alloc(int(act * b / 8) + (rng.randrange(0, 300_000) if weird else 0), forward_stack(p, i),
                                stream=0))
            if comm_stream and i % 3 == 0:
                c = p.alloc(3 * MIB, p.stack(f"{SITE}/distributed/distributed_c10d.py:2900:all_gather_into_tensor",
                                             "/home/me/train.py:50:train_step"), stream=comm_stream)
                p.free(c, delay=3)
        if spike:
            s = p.alloc(spike, p.stack(f"{SITE}/functional.py:412:einsum", "/home/me/model.py:77:attention_scores",
                                       "/home/me/train.py:50:train_step"))
            p.free(s)
        l = p.alloc(4, loss_stack(p))
        if leak:
            p.alloc(leak, p.stack("/home/me/train.py:60:log_losses", "/home/me/train.py:92:main"))
        new_grads = []
        for i in reversed(range(layers)):
            t = p.alloc(int(act * b / 8), backward_stack(p, i))
            new_grads.append(p.alloc(width + (i % 3) * 256 * KIB, backward_stack(p, i)))
            p.free(t)
            while len(acts) > 2 * i:
                p.free(acts.pop())
        p.free(l)
        if not states:
            for i in range(layers):
                for _ in range(2):
                    states.append(p.alloc(width + (i % 3) * 256 * KIB, optimizer_state_stack(p)))
        for i in range(layers):
            t = p.alloc(width + (i % 3) * 256 * KIB, optimizer_temp_stack(p))
            p.free(t)
        if not keep_grads:
            for g in new_grads:
                p.free(g)
        grads = new_grads
        if empty_every and step % empty_every == empty_every - 1:
            p.empty_cache()
    del params, grads
    return p


def chaos(n=4000, seed=0, streams=(0,), top=26, pools=((0, 0),), delays=(0,), empty=0.0):
    """Random sizes over the whole range, random lifetimes: what no training job does, for the policy's corners."""
    rng = random.Random(seed)
    p = Program()
    live = []
    stacks = [forward_stack(p, i) for i in range(40)]
    ended = set()
    for _ in range(n):
        r = rng.random()
        if live and r < 0.49:
            p.free(live.pop(rng.randrange(len(live))), delay=rng.choice(delays))
        elif r < 0.49 + empty:
            p.empty_cache()
        else:
            pool = rng.choice([q for q in pools if q not in ended] or [(0, 0)])
            live.append(p.alloc(2 ** rng.uniform(6, top), rng.choice(stacks), rng.choice(streams), pool))
    return p


def device(total, others=0):
    return Device(total, others)


__all__ = ["Program", "run", "training", "chaos", "device", "Allocator", "Settings", "GIB", "MIB", "KIB"]
