"""Training steps with the shape of real ones: forward, loss, backward, optimizer, with realistic sizes and op times.

Not recordings. They have the structure that matters to a planner (what backward reads, what is written in place, what is
large and cheap or small and dear) with times per MiB measured on a CPU: GELU and LayerNorm 0.10 ms, log-softmax 0.13, embedding 0.13,
linear outputs 0.45, attention outputs 1.3, dropout masks 2.5 (float masks, two-valued, so packable).
"""
import random
import zlib

from mft import Op, Step, Value

MIB = 1 << 20
MS_PER_MIB = {"gelu": 0.10, "relu": 0.08, "layer_norm": 0.10, "batch_norm": 0.15, "log_softmax": 0.13, "embedding": 0.13, "linear": 0.45,
              "conv": 2.2, "attention": 1.3, "dropout_mask": 2.5, "mul": 0.08, "add": 0.08, "pool": 0.2, "cat": 0.08, "sigmoid": 0.15,
              "tanh": 0.2, "upsample": 0.15, "sum": 0.1, "copy": 0.06}


class Tape:
    """Writes ops down; backward() walks what was written in reverse, as autograd does, and frees what it saved."""

    def __init__(self, seed=0, jitter=0.15):
        self.step = Step()
        self.random = random.Random(seed)
        self.jitter = jitter
        self.nodes = []  # (inputs that want gradients, output, saved values, time factor, name)
        self.refs = {}  # value -> handles held
        self.grads = {}  # value -> gradient value
        self.params = []

    # -- raw recording
    def source(self, size, category, wants_grad=False):
        self.step.values.append(Value(int(size), category=category, storage=len(self.step.values)))
        v = len(self.step.values) - 1
        self.refs[v] = 1
        if wants_grad:
            self.params.append(v)
        return v

    def op(self, name, inputs, sizes, ms, workspace=0, replay="yes", overwrites=None, category="activation", packable=False):
        i = len(self.step.ops)
        ms = ms * (1 + self.jitter * (2 * self.random.random() - 1))
        outs = []
        for size in sizes:
            self.step.values.append(Value(int(size), producer=i, storage=len(self.step.values), category=category))
            outs.append(len(self.step.values) - 1)
            self.refs[outs[-1]] = 1
        if packable:
            mask = self.step.values[outs[-1]]
            mask.packed_bytes = max(1, mask.bytes // 32)
            mask.pack_seconds = mask.unpack_seconds = 0.1e-3 * mask.bytes / MIB
        if overwrites is not None:
            new, old = self.step.values[outs[0]], self.step.values[overwrites]
            new.overwrites, new.storage, new.category = overwrites, old.storage, old.category
            old.death = i
            self.refs[overwrites] = -1
        ins = list(dict.fromkeys(inputs))
        shape_hash = zlib.crc32(repr((name, [self.step.values[v].bytes for v in ins])).encode())
        self.step.ops.append(Op(name, ins, outs, ms / 1e3, int(workspace), replay, hash=shape_hash))
        return outs if len(outs) != 1 else outs[0]

    def hold(self, v):
        self.refs[v] += 1

    def release(self, v):
        if self.refs[v] < 0 or self.step.values[v].producer is None:
            return
        self.refs[v] -= 1
        if self.refs[v] == 0:
            self.step.values[v].death = len(self.step.ops) - 1

    # -- differentiable ops: name, inputs, output size, what backward saves
    def node(self, name, inputs, out, saved, params=(), factor=1.0):
        for v in saved:
            self.hold(v)
        self.nodes.append((name, list(inputs), out, list(saved), list(params), factor))
        return out

    def size(self, v):
        return self.step.values[v].bytes

    def time(self, kind, size):
        return MS_PER_MIB[kind] * size / MIB

    def unary(self, kind, x, save="input", in_place=False):
        y = self.op(kind, [x], [self.size(x)], self.time(kind, self.size(x)), overwrites=x if in_place else None)
        return self.node(kind, [x], y, {"input": [x], "output": [y], "none": []}[save])

    def linear(self, x, width_in, width_out, kind="linear", workspace=0, spatial=1.0):
        w = self.source(width_in * width_out * 4 * (9 if kind == "conv" else 1), "parameter", True)
        out = self.size(x) * width_out / width_in * spatial
        y = self.op(kind, [x, w], [out], self.time(kind, out) * max(0.3, width_in / 256), workspace=workspace)
        return self.node(kind, [x], y, [x, w], [w], 2.0)

    def norm(self, kind, x):
        w = self.source(4096, "parameter", True)
        y, stats = self.op(kind, [x, w], [self.size(x), max(64, self.size(x) // 256)], self.time(kind, self.size(x)))
        self.node(kind, [x], y, [x, w, stats], [w], 1.5)
        self.release(stats)
        return y

    def dropout(self, x):
        mask = self.op("dropout_mask", [], [self.size(x)], self.time("dropout_mask", self.size(x)), packable=True)
        y = self.op("mul", [x, mask], [self.size(x)], self.time("mul", self.size(x)))
        self.node("mul", [x], y, [mask])
        self.release(mask)
        return y

    def add(self, a, b, in_place=False):
        y = self.op("add", [a, b], [self.size(a)], self.time("add", self.size(a)), overwrites=a if in_place else None)
        return self.node("add", [a, b], y, [])

    def attention(self, q, k, v):
        out, lse = self.op("attention", [q, k, v], [self.size(q), self.size(q) // 64], self.time("attention", self.size(q)), workspace=self.size(q) // 4)
        self.node("attention", [q, k, v], out, [q, k, v, out, lse], factor=2.5)
        self.release(lse)
        return out

    # -- loss, backward, optimizer
    def backward(self, loss_input):
        loss = self.op("nll_loss", [loss_input], [4], 0.05)
        self.node("nll_loss", [loss_input], loss, [loss_input])
        grads = {loss: self.op("ones_like", [loss], [4], 0.01, category="gradient")}
        for name, inputs, out, saved, params, factor in reversed(self.nodes):
            g = grads.pop(out, None)
            if g is None:
                for v in saved:
                    self.release(v)
                continue
            targets = [v for v in inputs if self.step.values[v].category != "input"]
            base = MS_PER_MIB.get(name, 0.1) * sum(self.size(v) for v in targets) / MIB * factor if targets else 0.02
            if targets:
                made = self.op(name + "_backward", [g] + saved, [self.size(v) for v in targets], base + 0.01, category="gradient",
                               workspace=self.size(g) // 8 if name == "conv" else 0)
                made = made if isinstance(made, list) else [made]
                for v, fresh in zip(targets, made):
                    self._accumulate(grads, v, fresh)
            for p in params:
                fresh = self.op(name + "_grad_weight", [g] + [v for v in saved if v != p], [self.size(p)], base * 0.5 + 0.01, category="gradient")
                self._accumulate(self.grads, p, fresh)
            self.release(g)
            for v in saved:
                self.release(v)
        self.nodes.clear()
        for g in grads.values():  # of sources that are no parameters
            self.release(g)
        return loss

    def _accumulate(self, grads, v, fresh):
        if v not in grads:
            grads[v] = fresh
            return
        grads[v] = self.op("add_", [grads[v], fresh], [self.size(fresh)], self.time("add", self.size(fresh)), overwrites=grads[v], category="gradient")
        self.release(fresh)

    def finish(self, optimizer=True, loss=None):
        if loss is not None:
            self.op("item", [loss], [], 0.01, replay="side effect")
            self.release(loss)
        for p in self.params if optimizer else []:
            if p in self.grads:
                new = self.op("sgd_", [p, self.grads[p]], [self.size(p)], self.time("add", self.size(p)), replay="writes a source", overwrites=p)
                self.step.values[new].death = None
        for g in self.grads.values():
            if optimizer:
                self.release(g)
        step = self.step
        step.seconds = sum(op.seconds for op in step.ops) * 1.02
        return step


def gpt(blocks=2, tokens_mib=2.0, width=256, dropout=True, heads_workspace=True, vocab_factor=8, seed=0, optimizer=True, batch=None):
    t = Tape(seed)
    ids = t.source(tokens_mib * MIB / 128, "input")
    table = t.source(1 * MIB, "parameter", True)
    x = t.op("embedding", [ids, table], [tokens_mib * MIB], t.time("embedding", tokens_mib * MIB))
    t.node("embedding", [ids], x, [ids], [table])

    def drop(v):
        if not dropout:
            return v
        y = t.dropout(v)
        t.release(v)
        return y

    x = drop(x)
    for _ in range(blocks):
        h = t.norm("layer_norm", x)
        q, k, v = (t.linear(h, width, width) for _ in range(3))
        t.release(h)
        a = t.attention(q, k, v)
        for u in (q, k, v):
            t.release(u)
        o = drop(t.linear(a, width, width))
        t.release(a)
        y = t.add(x, o)
        t.release(x), t.release(o)
        h = t.norm("layer_norm", y)
        up = t.linear(h, width, 4 * width)
        t.release(h)
        act = t.unary("gelu", up)
        t.release(up)
        down = drop(t.linear(act, 4 * width, width))
        t.release(act)
        x = t.add(y, down)
        t.release(y), t.release(down)
    h = t.norm("layer_norm", x)
    t.release(x)
    logits = t.linear(h, width, vocab_factor * width)
    t.release(h)
    out = t.unary("log_softmax", logits, save="output")
    t.release(logits)
    loss = t.backward(out)
    t.release(out)
    t.step.batch = batch
    return t.finish(optimizer, loss)


def mlp(layers=8, mib=2.0, widths=(256, 512, 128, 384), act="relu", in_place=True, seed=0, optimizer=True):
    t = Tape(seed)
    x = t.source(mib * MIB, "input")
    w_in = 256
    for i in range(layers):
        w_out = widths[i % len(widths)]
        y = t.linear(x, w_in, w_out)
        t.release(x)
        x = t.unary(act, y, save="output" if act == "relu" else "input", in_place=in_place and act == "relu")
        if not (in_place and act == "relu"):
            t.release(y)
        w_in = w_out
    out = t.unary("log_softmax", x, save="output")
    t.release(x)
    loss = t.backward(out)
    t.release(out)
    return t.finish(optimizer, loss)


def cnn(blocks=4, mib=4.0, channels=64, residual=True, in_place=True, seed=0, optimizer=True, pool_every=0):
    t = Tape(seed)
    x = t.source(mib * MIB * 3 / channels, "input")
    h = t.linear(x, 3, channels, "conv", workspace=mib * MIB / 2)
    x = h
    for b in range(blocks):
        y = t.linear(x, channels, channels, "conv", workspace=t.size(x) / 2)
        z = t.norm("batch_norm", y)
        t.release(y)
        if residual:
            z2 = t.add(z, x, in_place=in_place)
            if not in_place:
                t.release(z)
            t.release(x)
            z = z2
        else:
            t.release(x)
        x = t.unary("relu", z, save="output", in_place=in_place)
        if not in_place:
            t.release(z)
        if pool_every and b % pool_every == pool_every - 1:
            p, index = t.op("pool", [x], [t.size(x) // 4, t.size(x) // 2], t.time("pool", t.size(x)))
            t.node("pool", [x], p, [index])
            t.release(index), t.release(x)
            x = p
    out = t.op("sum", [x], [max(4096, t.size(x) // 256)], t.time("sum", t.size(x)))
    t.node("sum", [x], out, [])
    t.release(x)
    loss = t.backward(out)
    t.release(out)
    return t.finish(optimizer, loss)


def unet(depth=2, mib=4.0, channels=32, seed=0, optimizer=True):
    t = Tape(seed)
    x = t.source(mib * MIB / 8, "input")
    c = 4

    def double(x, c_in, c_out):
        for i in range(2):
            y = t.linear(x, c_in if i == 0 else c_out, c_out, "conv", workspace=t.size(x) / 4)
            t.release(x)
            z = t.norm("batch_norm", y)
            t.release(y)
            x = t.unary("relu", z, save="output", in_place=True)
        return x

    skips = []
    for d in range(depth):
        x = double(x, c, channels << d)
        c = channels << d
        skips.append(x)
        p, index = t.op("pool", [x], [t.size(x) // 4, t.size(x) // 2], t.time("pool", t.size(x)))
        t.node("pool", [x], p, [index])
        t.release(index)
        x = p
    x = double(x, c, channels << depth)
    c = channels << depth
    for d in reversed(range(depth)):
        u = t.op("upsample", [x], [t.size(x) * 2], t.time("upsample", t.size(x) * 2))
        t.node("upsample", [x], u, [])
        t.release(x)
        s = skips[d]
        k = t.op("cat", [u, s], [t.size(u) + t.size(s)], t.time("cat", t.size(u) + t.size(s)))
        t.node("cat", [u, s], k, [])
        t.release(u), t.release(s)
        x = double(k, 2 * c, channels << d)
        c = channels << d
    out = t.unary("log_softmax", x, save="output")
    t.release(x)
    loss = t.backward(out)
    t.release(out)
    return t.finish(optimizer, loss)


def lstm(steps=6, mib=0.5, hidden=256, seed=0, optimizer=True):
    t = Tape(seed)
    w = t.source(hidden * hidden * 4 * 4, "parameter", True)
    xs = [t.source(mib * MIB, "input") for _ in range(steps)]
    h = t.op("zeros", [], [mib * MIB], 0.02)
    c = t.op("zeros", [], [mib * MIB], 0.02)
    hs = []
    for i in range(steps):
        gates = t.op("linear", [xs[i], h, w], [4 * t.size(h)], t.time("linear", 4 * t.size(h)))
        t.node("linear", [h], gates, [xs[i], h, w], [w], 2.0)
        acts = t.op("sigmoid_", [gates], [t.size(gates)], t.time("sigmoid", t.size(gates)), overwrites=gates)
        t.node("sigmoid", [gates], acts, [acts])
        new_c = t.op("cell", [acts, c], [t.size(c)], t.time("mul", 3 * t.size(c)))
        t.node("mul", [acts, c], new_c, [acts, c])
        t.release(c)
        tc = t.unary("tanh", new_c, save="output")
        new_h = t.op("mul", [acts, tc], [t.size(h)], t.time("mul", t.size(h)))
        t.node("mul", [acts, tc], new_h, [acts, tc])
        t.release(acts), t.release(tc), t.release(h)
        h, c = new_h, new_c
        hs.append(h)
        t.hold(h)
    k = t.op("cat", hs, [sum(t.size(v) for v in hs)], t.time("cat", sum(t.size(v) for v in hs)))
    t.node("cat", hs, k, [])
    for v in hs:
        t.release(v)
    t.release(h), t.release(c)
    logits = t.linear(k, hidden, hidden)
    t.release(k)
    out = t.unary("log_softmax", logits, save="output")
    t.release(logits)
    loss = t.backward(out)
    t.release(out)
    return t.finish(optimizer, loss)


def suite():
    """At least 20 steps of tens of ops to a hundred, for the solver to prove."""
    return {
        "gpt1": gpt(1, optimizer=False), "gpt1_nodrop": gpt(1, dropout=False), "gpt1_smallvocab": gpt(1, vocab_factor=2, seed=3, optimizer=False),
        "gpt2_nodrop": gpt(2, dropout=False, vocab_factor=2, optimizer=False, seed=1),
        "gpt2": gpt(2, optimizer=False, vocab_factor=2, seed=2),
        "mlp6": mlp(6), "mlp8_gelu": mlp(8, act="gelu", seed=1), "mlp12": mlp(12, seed=2, optimizer=False), "mlp10_noinplace": mlp(10, in_place=False, seed=3),
        "mlp10_uneven": mlp(10, widths=(256, 1024, 64, 2048, 128), seed=4, act="gelu", optimizer=False),
        "cnn3": cnn(3), "cnn4_plain": cnn(4, residual=False, seed=1), "cnn4_copy": cnn(4, in_place=False, seed=2, optimizer=False),
        "cnn5_pool": cnn(5, pool_every=2, seed=3, optimizer=False), "cnn6": cnn(6, seed=4, optimizer=False),
        "cnn6_plain_pool": cnn(6, residual=False, pool_every=2, seed=5, optimizer=False),
        "unet1": unet(1), "unet2": unet(2, optimizer=False, seed=1), "unet1_wide": unet(1, channels=64, seed=2, optimizer=False),
        "lstm4": lstm(4), "lstm6": lstm(6, seed=1, optimizer=False), "lstm8": lstm(8, seed=2, optimizer=False),
    }
