"""A second implementation of PyTorch's CUDA caching allocator policy, in Python, for tests.

It is written from the documented behaviour and shares nothing with memfit's C++ replay: blocks stand in plain lists per
segment and the free lists are sorted Python lists. It plays a device of a given size, gives out addresses, and records
the events that PyTorch's memory history would record, with the reserved bytes after each one.
"""
from __future__ import annotations

import bisect
import dataclasses
import random
from typing import Optional

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL_LIMIT = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_LIMIT = 10 * MIB
ROUND_LARGE = 2 * MIB
GRAIN = 512


@dataclasses.dataclass
class Settings:
    max_split_size: Optional[int] = None
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int = 0  # the same for every size
    memory_fraction: Optional[float] = None  # set_per_process_memory_fraction
    large_segment: int = 20 * MIB
    max_non_split_rounding: int = 20 * MIB

    def conf(self) -> str:
        parts = []
        if self.max_split_size is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size // MIB}")
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold}")
        if self.roundup_power2_divisions:
            parts.append(f"roundup_power2_divisions:{self.roundup_power2_divisions}")
        if self.large_segment != 20 * MIB:
            parts.append(f"large_segment_size_mb:{self.large_segment // MIB}")
        if self.max_non_split_rounding != 20 * MIB:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // MIB}")
        if self.memory_fraction is not None:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction}")
        return ",".join(parts)


class OutOfMemory(Exception):
    pass


class Blk:
    __slots__ = ("addr", "size", "req", "state", "seg", "born", "stack", "streams", "wait")

    def __init__(self, addr, size, state, seg):
        self.addr, self.size, self.state, self.seg = addr, size, state, seg
        self.req = 0
        self.born = 0
        self.stack = None
        self.streams = ()
        self.wait = 0


FREE, USED, PENDING, UNMAPPED = "free", "used", "pending", "unmapped"


class Seg:
    """One cudaMalloc, or one range of address space of an expandable segment."""

    def __init__(self, base, size, pool, stream, expandable, granule, stack):
        self.base, self.size, self.pool, self.stream = base, size, pool, stream
        self.expandable, self.granule = expandable, granule
        self.blocks: list[Blk] = []
        self.starts: list[int] = []
        self.stack = stack

    def index(self, blk):
        return bisect.bisect_left(self.starts, blk.addr)

    def replace(self, i, count, blocks):
        self.blocks[i:i + count] = blocks
        self.starts[i:i + count] = [b.addr for b in blocks]


class Pool:
    def __init__(self, small, pool_id):
        self.small, self.pool_id = small, pool_id
        self.free: list[tuple[int, int, int]] = []  # (stream, size, addr), sorted: best fit = first that is large enough
        self.by_addr: dict[int, Blk] = {}
        self.unmapped: list[tuple[int, int]] = []  # (stream, addr)
        self.unmapped_blk: dict[int, Blk] = {}
        self.calls = 0

    def add(self, blk):
        blk.born = self.calls
        bisect.insort(self.free, (blk.seg.stream, blk.size, blk.addr))
        self.by_addr[blk.addr] = blk

    def drop(self, blk):
        i = bisect.bisect_left(self.free, (blk.seg.stream, blk.size, blk.addr))
        assert self.free[i] == (blk.seg.stream, blk.size, blk.addr)
        del self.free[i]
        del self.by_addr[blk.addr]

    def add_unmapped(self, blk):
        bisect.insort(self.unmapped, (blk.seg.stream, blk.addr))
        self.unmapped_blk[blk.addr] = blk

    def drop_unmapped(self, blk):
        self.unmapped.remove((blk.seg.stream, blk.addr))
        del self.unmapped_blk[blk.addr]


class Device:
    """Memory of one card. Addresses come from the lowest hole that fits, so they are not in order of time."""

    def __init__(self, total, others=0, base=0x7f0000000000, rng=None):
        self.total, self.others, self.base = total, others, base
        self.used = 0
        self.live: list[tuple[int, int]] = []
        self.rng = rng

    def free_bytes(self):
        return self.total - self.others - self.used

    def malloc(self, size):
        if size > self.free_bytes():
            return None
        addr = self.base
        for a, s in self.live:
            if a - addr >= size:
                break
            addr = (a + s + SMALL_SEGMENT - 1) // SMALL_SEGMENT * SMALL_SEGMENT
        bisect.insort(self.live, (addr, size))
        self.used += size
        return addr

    def free(self, addr, size):
        self.live.remove((addr, size))
        self.used -= size

    def take(self, size):
        if size > self.free_bytes():
            return False
        self.used += size
        return True

    def give(self, size):
        self.used -= size


class Allocator:
    def __init__(self, device: Device, settings: Settings, device_index=0):
        self.dev, self.set, self.index = device, settings, device_index
        self.pools: dict[tuple, tuple[Pool, Pool]] = {}
        self.pool_live: set = {(0, 0)}
        self.segs: list[Seg] = []
        self.events: list[dict] = []
        self.reserved_after: list[int] = []
        self.reserved = 0
        self.allocated = 0
        self.used: dict[int, Blk] = {}
        self.pending: list[Blk] = []
        self.clock = 1_700_000_000_000_000
        self.limit = None
        if settings.memory_fraction is not None:
            self.limit = int(settings.memory_fraction * device.total)
        self.next_va = 0x600000000000

    # -- recording
    def record(self, action, addr, size, stream, stack, pool_id):
        self.clock += 7
        e = {"action": action}
        e["device_free" if action == "oom" else "addr"] = addr
        e["size"] = size
        e["stream"] = stream
        e["time_us"] = self.clock
        e["pool_id"] = pool_id
        e["frames"] = stack
        self.events.append(e)
        self.reserved_after.append(self.reserved)

    # -- sizes
    def round(self, n):
        if n < GRAIN:
            return GRAIN
        d = self.set.roundup_power2_divisions
        if d > 1 and n > GRAIN * d:
            if n & (n - 1) == 0:
                return n
            floor = 1 << (n.bit_length() - 1)
            step = floor >> (d.bit_length() - 1)
            if step == 0:
                return floor * 2
            return n if n % step == 0 else (n // step + 1) * step
        return (n + GRAIN - 1) // GRAIN * GRAIN

    def segment_size(self, size):
        if size <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if size < LARGE_LIMIT:
            return self.set.large_segment
        return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE

    def pool_for(self, size, pool_id):
        if pool_id not in self.pools:
            self.pools[pool_id] = (Pool(True, pool_id), Pool(False, pool_id))
            self.pool_live.add(pool_id)
        small, large = self.pools[pool_id]
        return small if size <= SMALL_LIMIT else large

    @property
    def split_limit(self):
        return self.set.max_split_size if self.set.max_split_size is not None else 1 << 64

    # -- the policy
    def malloc(self, nbytes, stream=0, stack=None, pool_id=(0, 0)):
        self.process_events(stack)
        size = self.round(nbytes)
        pool = self.pool_for(size, pool_id)
        blk = self.best_fit(pool, size, stream)
        if blk is None:
            if self.limit is not None and self.set.garbage_collection_threshold > 0:
                self.collect_garbage(stack)
            blk = self.grow(pool, size, stream, stack)
            if blk is None and self.release_oversize(pool, size, stream, stack):
                blk = self.grow(pool, size, stream, stack)
            if blk is None:
                self.release_all(stack)
                blk = self.grow(pool, size, stream, stack)
        if blk is None:
            self.record("oom", self.dev.free_bytes(), size, stream, stack, pool_id)
            raise OutOfMemory(nbytes)
        self.carve(pool, blk, size)
        blk.req = nbytes
        blk.stack = stack
        blk.state = USED
        self.used[blk.addr] = blk
        self.allocated += blk.size
        self.record("alloc", blk.addr, nbytes, stream, stack, pool_id)
        return blk.addr

    def best_fit(self, pool, size, stream):
        gc = self.limit is not None and self.set.garbage_collection_threshold > 0
        if gc:
            pool.calls += 1
        i = bisect.bisect_left(pool.free, (stream, size, 0))
        if i == len(pool.free) or pool.free[i][0] != stream:
            return None
        pick = pool.by_addr[pool.free[i][2]]
        if pick.seg.expandable:
            if not self.set.expandable_segments:
                i += 1
                while i < len(pool.free) and pool.by_addr[pool.free[i][2]].seg.expandable and pool.free[i][0] == stream:
                    i += 1
                if i == len(pool.free) or pool.free[i][0] != stream:
                    return None
                pick = pool.by_addr[pool.free[i][2]]
            else:
                def room(b):
                    after = b.seg.index(b) + 1
                    more = b.seg.blocks[after] if after < len(b.seg.blocks) else None
                    return b.size + (more.size if more is not None and more.state == UNMAPPED else 0)
                while (pick.seg.expandable and i + 1 < len(pool.free) and pool.free[i + 1][0] == stream
                       and room(pool.by_addr[pool.free[i + 1][2]]) < room(pick)):
                    i += 1
                    pick = pool.by_addr[pool.free[i][2]]
        if size < self.split_limit <= pick.size:
            return None
        if size >= self.split_limit and pick.size >= size + self.set.max_non_split_rounding:
            return None
        pool.drop(pick)
        return pick

    def carve(self, pool, blk, size):
        rest = blk.size - size
        if pool.small or self.set.expandable_segments:
            split = rest >= GRAIN
        else:
            split = size < self.split_limit and rest > SMALL_LIMIT
        if not split:
            return
        seg = blk.seg
        i = seg.index(blk)
        tail = Blk(blk.addr + size, rest, FREE, seg)
        blk.size = size
        seg.replace(i + 1, 0, [tail])
        pool.add(tail)

    def grow(self, pool, size, stream, stack):
        want = self.segment_size(size)
        if self.limit is not None and self.reserved + want > self.limit:
            return None
        if self.set.expandable_segments:
            return self.expand(pool, size, stream, stack)
        addr = self.dev.malloc(want)
        if addr is None:
            return None
        seg = Seg(addr, want, pool, stream, False, 0, stack)
        blk = Blk(addr, want, FREE, seg)
        seg.replace(0, 0, [blk])
        self.segs.append(seg)
        self.reserved += want
        self.record("segment_alloc", addr, want, stream, stack, pool.pool_id)
        return blk

    # -- expandable segments
    def expand(self, pool, size, stream, stack):
        start = None
        i = bisect.bisect_left(pool.unmapped, (stream, 0))
        while i < len(pool.unmapped) and pool.unmapped[i][0] == stream:
            b = pool.unmapped_blk[pool.unmapped[i][1]]
            at = b.seg.index(b)
            if at > 0 and b.seg.blocks[at - 1].state in (FREE, UNMAPPED):
                at -= 1
            room, j = 0, at
            while room < size and j < len(b.seg.blocks) and b.seg.blocks[j].state in (FREE, UNMAPPED):
                room += b.seg.blocks[j].size
                j += 1
            if room >= size:
                start = b.seg.blocks[at]
                break
            i += 1
        if start is None:
            granule = SMALL_SEGMENT if pool.small else self.set.large_segment
            whole = self.dev.total + self.dev.total // 8
            count = (whole + granule - 1) // granule
            seg = Seg(self.next_va, count * granule, pool, stream, True, granule, stack)
            self.next_va += (count * granule + GIB - 1) // GIB * GIB + GIB
            start = Blk(seg.base, seg.size, UNMAPPED, seg)
            seg.replace(0, 0, [start])
            pool.add_unmapped(start)
            self.segs.append(seg)
        if start.state == UNMAPPED:
            start = self.map(pool, start, min(start.size, size), stack)
            if start is None:
                return None
        while start.size < size:
            nxt = start.seg.blocks[start.seg.index(start) + 1]
            start = self.map(pool, nxt, min(size - start.size, nxt.size), stack)
            if start is None:
                return None
        pool.drop(start)
        return start

    def map(self, pool, blk, size, stack):
        seg = blk.seg
        length = (size + seg.granule - 1) // seg.granule * seg.granule
        if not self.dev.take(length):
            return None
        pool.drop_unmapped(blk)
        i = seg.index(blk)
        parts = [blk]
        if length < blk.size:
            rest = Blk(blk.addr + length, blk.size - length, UNMAPPED, seg)
            pool.add_unmapped(rest)
            parts.append(rest)
        at = blk.addr
        blk.size, blk.state = length, FREE
        seg.replace(i, 1, parts)
        blk = self.merge(pool, blk)
        pool.add(blk)
        self.reserved += length
        self.record("segment_map", at, length, seg.stream, stack, pool.pool_id)
        return blk

    def merge(self, pool, blk):
        """Join blk (not in any free list) with its equal neighbours."""
        seg = blk.seg
        kind = blk.state
        i = seg.index(blk)
        if i > 0 and seg.blocks[i - 1].state == kind:
            left = seg.blocks[i - 1]
            (pool.drop if kind == FREE else pool.drop_unmapped)(left)
            blk.addr, blk.size = left.addr, left.size + blk.size
            seg.replace(i - 1, 2, [blk])
            i -= 1
        if i + 1 < len(seg.blocks) and seg.blocks[i + 1].state == kind:
            right = seg.blocks[i + 1]
            (pool.drop if kind == FREE else pool.drop_unmapped)(right)
            blk.size += right.size
            seg.replace(i, 2, [blk])
        return blk

    def unmap(self, pool, blk, stack):
        seg = blk.seg
        lo = -(-(blk.addr - seg.base) // seg.granule) * seg.granule + seg.base
        hi = (blk.addr + blk.size - seg.base) // seg.granule * seg.granule + seg.base
        if lo >= hi:
            return
        pool.drop(blk)
        i = seg.index(blk)
        parts = []
        end = blk.addr + blk.size
        if lo > blk.addr:
            parts.append(Blk(blk.addr, lo - blk.addr, FREE, seg))
        blk_start = blk.addr
        blk.addr, blk.size, blk.state = lo, hi - lo, UNMAPPED
        parts.append(blk)
        if end > hi:
            parts.append(Blk(hi, end - hi, FREE, seg))
        del blk_start
        seg.replace(i, 1, parts)
        for p in parts:
            if p.state == FREE:
                pool.add(p)
        blk = self.merge(pool, blk)
        pool.add_unmapped(blk)
        self.reserved -= hi - lo
        self.dev.give(hi - lo)
        self.record("segment_unmap", lo, hi - lo, seg.stream, stack, pool.pool_id)
        if len(seg.blocks) == 1:
            pool.drop_unmapped(blk)
            self.segs.remove(seg)

    # -- giving memory back
    def release_segment(self, pool, blk, stack):
        seg = blk.seg
        pool.drop(blk)
        self.segs.remove(seg)
        self.reserved -= seg.size
        self.record("segment_free", seg.base, seg.size, seg.stream, stack, pool.pool_id)
        self.dev.free(seg.base, seg.size)

    def release_pool(self, pool, stack):
        unmap = []
        for _, _, addr in list(pool.free):
            blk = pool.by_addr[addr]
            if blk.seg.expandable:
                unmap.append(blk)
            elif len(blk.seg.blocks) == 1:
                self.release_segment(pool, blk, stack)
        for blk in unmap:
            self.unmap(pool, blk, stack)

    def release_all(self, stack):
        for blk in list(self.pending):
            self.complete(blk, stack)
        for pool_id, (small, large) in list(self.pools.items()):
            if pool_id == (0, 0):
                self.release_pool(large, stack)
                self.release_pool(small, stack)
        for pool_id, (small, large) in list(self.pools.items()):
            if pool_id not in self.pool_live:
                self.release_pool(small, stack)
                self.release_pool(large, stack)

    def release_oversize(self, pool, size, stream, stack):
        if self.set.max_split_size is None or self.set.expandable_segments:
            return False
        want = max(size, self.split_limit)
        i = bisect.bisect_left(pool.free, (stream, want, 0))
        if i < len(pool.free) and pool.free[i][0] == stream:
            self.release_segment(pool, pool.by_addr[pool.free[i][2]], stack)
            return True
        released = 0
        i -= 1
        while i >= 0 and released < want and pool.free[i][0] == stream and pool.free[i][1] >= self.split_limit:
            blk = pool.by_addr[pool.free[i][2]]
            released += blk.size
            self.release_segment(pool, blk, stack)
            i -= 1
        return released >= want

    def collect_garbage(self, stack):
        line = int(self.set.garbage_collection_threshold * self.limit)
        if self.reserved <= line or (0, 0) not in self.pools:
            return
        target = self.reserved - line
        pool = self.pools[(0, 0)][1]
        whole = [b for _, _, a in pool.free for b in [pool.by_addr[a]] if len(b.seg.blocks) == 1 and not b.seg.expandable]
        age = sum(pool.calls - b.born for b in whole)
        count = len(whole)
        got, progress = 0, True
        while got < target and progress and count > 0:
            mean = age / count
            progress = False
            for b in list(whole):
                if pool.calls - b.born >= mean:
                    progress = True
                    got += b.size
                    age -= pool.calls - b.born
                    count -= 1
                    whole.remove(b)
                    self.release_segment(pool, b, stack)

    def empty_cache(self, stack=None):
        self.release_all(stack)

    # -- freeing
    def free(self, addr, stack=None, delay=0):
        """delay > 0: another stream still uses the block; it is free after that many allocations."""
        blk = self.used.pop(addr)
        self.allocated -= blk.size
        self.record("free_requested", addr, blk.req, blk.seg.stream, stack or blk.stack, blk.seg.pool.pool_id)
        if delay:
            blk.state, blk.wait = PENDING, delay
            self.pending.append(blk)
        else:
            self.complete(blk, stack)

    def complete(self, blk, stack):
        if blk in self.pending:
            self.pending.remove(blk)
        self.record("free_completed", blk.addr, blk.req, blk.seg.stream, stack or blk.stack, blk.seg.pool.pool_id)
        blk.state = FREE
        blk.stack = None
        pool = blk.seg.pool
        pool.add(self.merge(pool, blk))

    def process_events(self, stack):
        for blk in list(self.pending):
            blk.wait -= 1
            if blk.wait <= 0:
                self.complete(blk, stack)

    def end_pool(self, pool_id):
        """The graph that owned the pool is gone: its memory may be released."""
        self.pool_live.discard(pool_id)

    # -- what PyTorch's snapshot holds
    def segments(self):
        out = []
        for seg in self.segs:
            run: list[Blk] = []
            for blk in seg.blocks + [None]:
                if blk is not None and blk.state != UNMAPPED:
                    run.append(blk)
                    continue
                if run:
                    out.append(self.segment_dict(seg, run))
                run = []
        out.sort(key=lambda s: s["address"])
        return out

    def segment_dict(self, seg, run):
        state = {FREE: "inactive", USED: "active_allocated", PENDING: "active_pending_free"}
        blocks = [{"address": b.addr, "size": b.size, "requested_size": b.req if b.state != FREE else 0,
                   "state": state[b.state], "frames": b.stack or []} for b in run]
        return {
            "device": self.index, "address": run[0].addr, "total_size": sum(b.size for b in run),
            "allocated_size": sum(b.size for b in run if b.state == USED),
            "active_size": sum(b.size for b in run if b.state != FREE),
            "requested_size": sum(b.req for b in run if b.state != FREE),
            "stream": seg.stream, "segment_type": "small" if seg.pool.small else "large",
            "segment_pool_id": seg.pool.pool_id, "is_expandable": seg.expandable,
            "frames": seg.stack or [], "blocks": blocks,
        }
