#!/usr/bin/env python3
"""Write a realistic snapshot of a given size as a protocol 4 pickle, in bounded memory.

A training loop runs on the oracle allocator of tests/snapshot; its events are pickled one by one with the opcodes, the
memo and the framing of Python's own pickler (the self-test compares what pickle.load gives with the plain dictionary).

Usage: make_big.py --size 1GB --out big.pickle [--repeat] [--oom]     |     make_big.py --self-test
"""
import argparse
import io
import os
import pickle
import random
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "snapshot"))
from oracle_allocator import GIB, MIB, Allocator, Device, OutOfMemory, Settings  # noqa: E402
from snapshot_writer import CPP, PYTHON_TAIL, Stacks, allocator_settings  # noqa: E402

UNITS = {"MB": 10 ** 6, "GB": 10 ** 9}


class Pickle4:
    """The subset of Python's protocol 4 pickler that snapshots need, to a stream."""

    def __init__(self, f):
        self.f, self.buf, self.memo, self.n, self.written = f, bytearray(), {}, 0, 2
        f.write(b"\x80\x04")

    def flush(self, force=False):
        if len(self.buf) >= 64 * 1024 or (force and self.buf):
            if len(self.buf) >= 4:
                self.f.write(b"\x95" + struct.pack("<Q", len(self.buf)))
                self.written += 9
            self.f.write(self.buf)
            self.written += len(self.buf)
            self.buf = bytearray()

    def memoize(self, key=None):
        self.buf += b"\x94"
        if key is not None:
            self.memo[key] = self.n
        self.n += 1

    def get(self, index):
        self.buf += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def string(self, s, shared=True):
        key = ("s", s)
        if shared and key in self.memo:
            return self.get(self.memo[key])
        b = s.encode()
        self.buf += (b"\x8c" + bytes([len(b)]) if len(b) < 256 else b"X" + struct.pack("<I", len(b))) + b
        self.memoize(key if shared else None)

    def integer(self, n):
        if 0 <= n < 256:
            self.buf += b"K" + bytes([n])
        elif 0 <= n < 65536:
            self.buf += b"M" + struct.pack("<H", n)
        elif -2 ** 31 <= n < 2 ** 31:
            self.buf += b"J" + struct.pack("<i", n)
        else:
            raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
            self.buf += b"\x8a" + bytes([len(raw)]) + raw

    def value(self, v):
        if v is True:
            self.buf += b"\x88"
        elif v is False:
            self.buf += b"\x89"
        elif isinstance(v, int):
            self.integer(v)
        elif isinstance(v, float):
            self.buf += b"G" + struct.pack(">d", v)
        elif isinstance(v, str):
            self.string(v)
        elif isinstance(v, tuple):
            for x in v:
                self.value(x)
            self.buf += {2: b"\x86"}[len(v)]
            self.memoize()
        elif isinstance(v, dict):
            self.dictionary(v)
        elif isinstance(v, list):
            self.begin_list()
            for i in range(0, len(v), 1000):
                self.batch(v[i:i + 1000])
        else:
            raise TypeError(type(v))
        self.flush()

    def frame(self, d):
        key = ("f", id(d))
        if key in self.memo:
            return self.get(self.memo[key])
        self.buf += b"}"
        self.memoize(key)
        self.items(d)

    def dictionary(self, d):
        if "filename" in d:
            return self.frame(d)
        self.buf += b"}"
        self.memoize()
        self.items(d)

    def items(self, d):
        if not d:
            return
        self.buf += b"("
        for k, v in d.items():
            self.string(k)
            self.value(v)
        self.buf += b"u"

    def begin_list(self):
        self.buf += b"]"
        self.memoize()

    def batch(self, items):
        if len(items) == 1:
            self.value(items[0])
            self.buf += b"a"
        elif items:
            self.buf += b"("
            for i in items:
                self.value(i)
            self.buf += b"e"
        self.flush()

    def stop(self):
        self.buf += b"."
        self.flush(force=True)


class Job:
    """An endless training job of a transformer: names, stacks and sizes as a recording of one shows them."""

    def __init__(self, seed=0, layers=24, depth=40):
        self.rng = random.Random(seed)
        self.stacks = Stacks()
        self.settings = Settings()
        self.alloc = Allocator(Device(80 * GIB), self.settings)
        self.layers, self.depth = layers, depth
        site = "/opt/conda/lib/python3.11/site-packages/torch"
        outer = ["/home/me/train.py:%d:%s" % x for x in ((120, "train_step"), (300, "main"), (412, "<module>"))]
        wrap = PYTHON_TAIL

        def deep(*parts):
            # Each place in the program has callers of its own: thousands of distinct frames, as in a real job.
            deep.place += 1
            mid = [f"/home/me/blocks/part{deep.place % 97}.py:{100 + i}:run_{i % 9}" if i % 3 else wrap[i % 2] for i in range(depth)]
            return self.stacks.make(*CPP[: 4 + len(parts) % 3], *parts, *mid[: max(0, depth - len(parts) - 9)], *outer)

        deep.place = 0
        self.s_param = [deep(f"{site}/nn/modules/module.py:1012:convert", f"/home/me/model.py:{20 + i}:__init__") for i in range(layers)]
        self.s_fwd = [[deep(f"{site}/nn/functional.py:{2000 + k * 31}:{op}", f"{site}/nn/modules/{m}.py:{100 + k}:forward",
                            f"/home/me/model.py:{100 + 3 * i}:forward")
                       for k, (op, m) in enumerate((("layer_norm", "normalization"), ("linear", "linear"), ("scaled_dot_product_attention", "activation"),
                                                    ("linear", "linear"), ("gelu", "activation"), ("linear", "linear"), ("dropout", "dropout")))]
                      for i in range(layers)]
        self.s_bwd = [deep(f"{site}/autograd/graph.py:{820 + i % 5}:_engine_run_backward", f"{site}/_tensor.py:626:backward") for i in range(layers)]
        self.s_opt = deep(f"{site}/optim/adam.py:180:_init_group", f"{site}/optim/adam.py:232:step")
        self.s_tmp = [deep(f"{site}/optim/adam.py:{600 + i}:_multi_tensor_adam", f"{site}/optim/adam.py:244:step") for i in range(layers)]
        self.s_free = [deep(f"/home/me/model.py:{100 + 3 * i}:forward") for i in range(layers)]

    def spool(self, events_wanted):
        """Run steps and yield batches of events."""
        a, rng = self.alloc, self.rng
        for i in range(self.layers):
            a.malloc(12 * MIB, 0, self.s_param[i])
        first, done = True, 0
        while done < events_wanted:
            acts = []
            scale = rng.choice([7, 8, 8, 8, 9])
            for i in range(self.layers):
                for k, st in enumerate(self.s_fwd[i]):
                    t = a.malloc(int((0.3 + k % 3) * MIB * scale / 8) + rng.choice([0, 512, 4096, 100]), 0, st)
                    acts.append((t, i))
                    if k % 2:
                        a.free(acts.pop()[0], self.s_free[i])
            grads = []
            for i in reversed(range(self.layers)):
                t = a.malloc(3 * MIB * scale // 8, 0, self.s_bwd[i])
                grads.append(a.malloc(12 * MIB, 0, self.s_bwd[i]))
                a.free(t, self.s_bwd[i])
                while acts and acts[-1][1] == i:
                    a.free(acts.pop()[0], self.s_bwd[i])
            if first:
                for i in range(self.layers):
                    a.malloc(12 * MIB, 0, self.s_opt), a.malloc(12 * MIB, 0, self.s_opt)
                first = False
            for i in range(self.layers):
                a.free(a.malloc(12 * MIB, 0, self.s_tmp[i]), self.s_tmp[i])
            for g in grads:
                a.free(g, self.s_bwd[0])
            done += len(a.events)
            yield a.events
            a.events = []
            a.reserved_after = []


def decorate(e):
    e["compile_context"] = "N/A"
    e["user_metadata"] = ""
    return e


def write_big(path, size, depth=40, seed=0, events=None, repeat=False, oom=False):
    job = Job(seed=seed, depth=depth)
    wanted = events or 10 ** 12
    with open(path, "wb", buffering=1 << 20) as f:
        p = Pickle4(f)
        p.buf += b"}"
        p.memoize()
        p.buf += b"("
        # Segments are known when the job has run, so the traces come first; a dictionary's order means nothing.
        p.string("device_traces")
        p.begin_list()
        p.begin_list()
        count = 0
        chunk, chunk_events, chunk_memo, quiet = None, 0, 0, 0
        for batch in job.spool(wanted):
            settled = not any(e["action"].startswith("segment") for e in batch)
            quiet = quiet + 1 if settled else 0
            if repeat and chunk is None and quiet > 20:
                # All temporaries are free and no segment is taken any more: what follows can be said again and again.
                p.flush(force=True)
                chunk, real, memo_before, written_before = io.BytesIO(), p.f, p.n, p.written
                p.f = chunk
            elif chunk is not None and not settled:
                raise SystemExit("a step took a segment after all; use another seed")
            for i in range(0, len(batch), 1000):
                p.batch([decorate(e) for e in batch[i:i + 1000]])
            count += len(batch)
            if chunk is not None:
                chunk_events += len(batch)
                p.flush(force=True)
                if len(chunk.getvalue()) > 20_000_000:
                    p.f = real
                    p.f.write(chunk.getvalue())
                    times = max(0, (size - p.written) // len(chunk.getvalue()))
                    grown, length = p.n - memo_before, p.written - written_before
                    for _ in range(times):
                        p.f.write(chunk.getvalue())
                    p.n += grown * times
                    p.written += length * times
                    count += chunk_events * times
                    break
            elif events is None and p.written >= size:
                break
        if oom:  # the last request is more than the device has left
            job.alloc.dev.total = job.alloc.dev.used + job.alloc.dev.others + 100 * MIB
            try:
                job.alloc.malloc(600 * MIB, 0, job.s_fwd[3][2])
            except OutOfMemory:
                pass
            p.batch([decorate(e) for e in job.alloc.events])
            count += len(job.alloc.events)
        p.buf += b"a"
        p.string("segments")
        p.value(job.alloc.segments())
        p.string("allocator_settings")
        p.value(allocator_settings(job.settings))
        p.string("external_annotations")
        p.value([])
        p.buf += b"u"
        p.stop()
    return count, job


def self_test():
    import tempfile
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "t.pickle")
        count, job = write_big(path, 0, events=20000)
        with open(path, "rb") as f:
            got = pickle.load(f)
        again = Job()
        plain = [decorate(e) for batch in again.spool(20000) for e in batch]
        assert got["device_traces"] == [plain], "traces differ"
        assert got["segments"] == again.alloc.segments()
        assert len(plain) == count
        ours = os.path.getsize(path)
        theirs = len(pickle.dumps(got, protocol=4))
        print(f"self-test: {count} events, pickle.load gives the plain dictionary; {ours} bytes, Python's pickler {theirs}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="100MB")
    parser.add_argument("--events", type=int)
    parser.add_argument("--depth", type=int, default=40)
    parser.add_argument("--out")
    parser.add_argument("--repeat", action="store_true", help="simulate until the job is steady, then repeat its steps: fast")
    parser.add_argument("--oom", action="store_true", help="end with a request that runs out of memory")
    parser.add_argument("--self-test", action="store_true")
    a = parser.parse_args()
    if a.self_test:
        self_test()
    else:
        n, _ = write_big(a.out, int(float(a.size[:-2]) * UNITS[a.size[-2:]]), a.depth, events=a.events, repeat=a.repeat, oom=a.oom)
        print(f"{a.out}: {os.path.getsize(a.out)} bytes, {n} events")
