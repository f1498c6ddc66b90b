"""Steps as the planner sees them, and the .mft format, written a second time from docs/formats/mft.md.

Being a second implementation, it also checks the document: what this writes, memfit must read.
"""
import struct
import zlib
from dataclasses import dataclass, field

MAGIC = b"\x89MFT\r\n\x1a\n"
VERSION = 1
CATEGORIES = ["other", "parameter", "gradient", "optimizer state", "buffer", "input", "activation", "temporary"]
REPLAY = ["yes", "side effect", "random without generator", "nondeterministic", "custom op", "reads foreign memory",
          "writes a source", "communication"]


@dataclass
class Value:
    bytes: int
    producer: int | None = None  # None: a source
    death: int | None = None  # None: outlives the step
    overwrites: int | None = None
    storage: int = 0
    shape: tuple | None = None
    category: str = "other"
    needed_after: bool = True
    pinned: bool = False
    packed_bytes: int | None = None  # None: not packable
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0


@dataclass
class Op:
    name: str
    inputs: list
    outputs: list
    seconds: float
    workspace: int = 0
    replay: str = "yes"
    source_line: str | None = None
    hash: int = 0


@dataclass
class Step:
    values: list = field(default_factory=list)
    ops: list = field(default_factory=list)
    fixed_bytes: int = 0
    seconds: float = 0.0
    batch: int | None = None

    def live_bytes(self):
        """Bytes live while each op runs, nothing dropped."""
        overwritten = {v.overwrites for v in self.values if v.overwrites is not None}
        now = self.fixed_bytes + sum(v.bytes for v in self.values if v.producer is None)
        live = []
        dying = [0] * len(self.ops)
        for i, v in enumerate(self.values):
            if v.death is not None and i not in overwritten:
                dying[v.death] += v.bytes
        for i, op in enumerate(self.ops):
            now += sum(self.values[o].bytes for o in op.outputs if self.values[o].overwrites is None)
            live.append(now + op.workspace)
            now -= dying[i]
        return live

    def peak(self):
        return max(self.live_bytes())


class _Out:
    def __init__(self):
        self.data = bytearray()

    def number(self, x):
        while x >= 0x80:
            self.data.append(x & 0x7F | 0x80)
            x >>= 7
        self.data.append(x)

    def maybe(self, x):
        self.number(0 if x is None else x + 1)

    def text(self, s):
        raw = s.encode()
        self.number(len(raw))
        self.data += raw

    def fixed(self, fmt, *xs):
        self.data += struct.pack("<" + fmt, *xs)


def _step_payload(step):
    names, shapes = {}, {}
    for op in step.ops:
        names.setdefault(op.name, len(names))
        if op.source_line is not None:
            names.setdefault(op.source_line, len(names))
    for v in step.values:
        if v.shape is not None:
            shapes.setdefault(tuple(v.shape), len(shapes))
    o = _Out()
    o.number(step.fixed_bytes)
    o.fixed("d", step.seconds)
    o.maybe(step.batch)
    o.number(len(names))
    for name in names:
        o.text(name)
    o.number(len(shapes))
    for shape in shapes:
        o.number(len(shape))
        for size in shape:
            o.number(size)
    o.number(len(step.values))
    for v in step.values:
        flags = (v.needed_after | v.pinned << 1 | (v.packed_bytes is not None) << 2 | (v.overwrites is not None) << 3
                 | (v.shape is not None) << 4)
        o.fixed("BB", flags, CATEGORIES.index(v.category))
        o.number(v.bytes)
        o.maybe(v.producer)
        o.maybe(v.death)
        o.number(v.storage)
        if v.overwrites is not None:
            o.number(v.overwrites)
        if v.shape is not None:
            o.number(shapes[tuple(v.shape)])
        if v.packed_bytes is not None:
            o.number(v.packed_bytes)
            o.fixed("ff", v.pack_seconds, v.unpack_seconds)
    o.number(len(step.ops))
    for op in step.ops:
        o.fixed("Q", op.hash)
        o.maybe(names[op.name])
        o.maybe(names[op.source_line] if op.source_line is not None else None)
        o.fixed("Bd", REPLAY.index(op.replay), op.seconds)
        o.number(op.workspace)
        for operands in (op.inputs, op.outputs):
            o.number(len(operands))
            for v in operands:
                o.number(v)
    return bytes(o.data)


def encode(steps, program="", torch_version="", device="cpu", recorder="tests/plan/mft.py"):
    def section(tag, payload):
        body = tag + struct.pack("<Q", len(payload)) + payload
        return body + struct.pack("<I", zlib.crc32(body))

    info, end = _Out(), _Out()
    for s in (program, torch_version, device, recorder):
        info.text(s)
    end.number(len(steps))
    return (MAGIC + struct.pack("<I", VERSION) + section(b"I", bytes(info.data))
            + b"".join(section(b"S", _step_payload(s)) for s in steps) + section(b"E", bytes(end.data)))


class _In:
    def __init__(self, data, at=0):
        self.data, self.at = data, at

    def fixed(self, fmt):
        out = struct.unpack_from("<" + fmt, self.data, self.at)
        self.at += struct.calcsize("<" + fmt)
        return out if len(out) > 1 else out[0]

    def number(self):
        x = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            x |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return x

    def maybe(self):
        x = self.number()
        return x - 1 if x else None

    def text(self):
        n = self.number()
        self.at += n
        return self.data[self.at - n:self.at].decode()


def decode(data):
    """The steps of a well-formed file (no defence against hostile ones: that is memfit's job)."""
    assert data[:8] == MAGIC and struct.unpack_from("<I", data, 8)[0] == VERSION
    steps, at = [], 12
    while True:
        tag, length = data[at:at + 1], struct.unpack_from("<Q", data, at + 1)[0]
        assert zlib.crc32(data[at:at + 9 + length]) == struct.unpack_from("<I", data, at + 9 + length)[0]
        if tag == b"E":
            return steps
        if tag == b"S":
            steps.append(_decode_step(_In(data[at + 9:at + 9 + length])))
        at += 13 + length


def _decode_step(i):
    step = Step(fixed_bytes=i.number(), seconds=i.fixed("d"), batch=i.maybe())
    names = [i.text() for _ in range(i.number())]
    shapes = [tuple(i.number() for _ in range(i.number())) for _ in range(i.number())]
    for _ in range(i.number()):
        flags, category = i.fixed("BB")
        v = Value(bytes=i.number(), producer=i.maybe(), death=i.maybe(), storage=i.number(), category=CATEGORIES[category],
                  needed_after=bool(flags & 1), pinned=bool(flags & 2))
        if flags & 8:
            v.overwrites = i.number()
        if flags & 16:
            v.shape = shapes[i.number()]
        if flags & 4:
            v.packed_bytes = i.number()
            v.pack_seconds, v.unpack_seconds = i.fixed("ff")
        step.values.append(v)
    for _ in range(i.number()):
        h, name, line = i.fixed("Q"), i.maybe(), i.maybe()
        replay, seconds = i.fixed("Bd")
        workspace = i.number()
        ins = [i.number() for _ in range(i.number())]
        outs = [i.number() for _ in range(i.number())]
        step.ops.append(Op(names[name] if name is not None else "?", ins, outs, seconds, workspace, REPLAY[replay],
                           names[line] if line is not None else None, h))
    return step
