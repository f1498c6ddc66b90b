"""Snapshots with a known cause: name -> Case. Near-misses look like a cause and are none."""
from __future__ import annotations

import dataclasses
import random
from typing import Callable, Optional

from workloads import (GIB, MIB, KIB, Program, Settings, backward_stack, forward_stack, optimizer_temp_stack, param_stack,
                       training)


@dataclasses.dataclass
class Case:
    program: Program
    expect: set                      # kinds of verdicts, all of them
    total: int = 8 * GIB
    settings: Settings = dataclasses.field(default_factory=Settings)
    others: int = 0
    flags: tuple = ()                # of memfit explain
    keep_last: Optional[int] = None  # the ring's size
    old: bool = False                # a version before expandable segments and settings
    history: bool = True
    list_only: bool = False
    form: str = "4"
    unrecorded: Optional[str] = None
    advice: tuple = ()               # words that must be in some advice
    no_advice: tuple = ()            # words that must be in none
    check: Optional[Callable] = None  # of the JSON
    on_oom: str = "stop"


def user(p, where):
    return p.stack(where, "/home/me/train.py:92:main")


def wobble(seed, steps=14):
    rng = random.Random(seed)
    sizes = [rng.choice([5, 6, 7, 8, 9, 10]) for _ in range(steps)]
    return lambda s: sizes[s]


def pinned(p, count, big, pin, stream=0, pool=(0, 0)):
    """Segments of which only a pin stays in use."""
    blocks = []
    for i in range(count):
        a = p.alloc(pin, user(p, "/home/me/cache.py:12:remember"), stream, pool)
        b = p.alloc(big, forward_stack(p, i), stream, pool)
        blocks.append((a, b))
    return blocks


def pinned_free(p, count, big, pin, **where):
    """One large block per segment is split: its front stays, the rest is given back to the cache."""
    for i in range(count):
        whole = p.alloc(big, forward_stack(p, i), **where)
        p.free(whole)
        p.alloc(pin, user(p, "/home/me/cache.py:12:remember"), **where)
        # fill what is left so that the next round takes a new segment, then let it go at the end
        rest = p.alloc(big - pin, forward_stack(p, i), **where)
        yield rest


def fragments(count, big, pin, request, **where):
    p = Program()
    rests = list(pinned_free(p, count, big, pin, **where))
    for r in rests:
        p.free(r)
    if request:
        p.alloc(request, user(p, "/home/me/model.py:70:attention"))
    return p


def plateau(steps):
    """A cache that grows and stops growing."""
    base = training(steps=steps, layers=4)
    p = Program()
    p.stacks = base.stacks
    p.next_id = base.next_id
    grown = 0
    for op in base.ops:
        p.ops.append(op)
        if op[0] == "alloc" and op[2] == 4:  # the loss of a step
            grown += 1
            if grown <= steps // 2:
                p.alloc(6 * MIB, user(p, "/home/me/cache.py:30:warm"))
    return p


def growing_batches():
    return training(steps=8, layers=6, batch=lambda s: 8 + 2 * s, act=4 * MIB)


def two_streams(request, total_each, count=12):
    p = Program()
    rests = []
    for s in range(1, 5):
        rests += list(pinned_free(p, count, total_each, 2 * MIB, stream=s * 0x1000))
    for r in rests:
        p.free(r)
    p.alloc(request, user(p, "/home/me/model.py:70:attention"))
    return p


def graph_pools(request, count, big):
    p = Program()
    rests = []
    for g in range(1, 5):
        rests += list(pinned_free(p, count, big, 2 * MIB, pool=(0, g)))
    for r in rests:
        p.free(r)
    p.alloc(request, user(p, "/home/me/model.py:70:attention"))
    return p


def others_grow(step_size):
    p = training(steps=4, layers=8, width=32 * MIB, act=16 * MIB)
    p.empty_cache()
    p.others(6 * GIB)
    t = [p.alloc(step_size, forward_stack(p, i)) for i in range(8)]
    del t
    return p


def late(program_before, program_after):
    p = Program()
    p.stacks = program_before.stacks
    p.ops = list(program_before.ops)
    p.start_recording()
    shift = program_before.next_id
    for op in program_after.ops:
        if op[0] == "alloc":
            op = ("alloc", op[1] + shift) + op[2:]
        elif op[0] == "free":
            op = ("free", op[1] + shift) + op[2:]
        p.ops.append(op)
    p.next_id = shift + program_after.next_id
    return p


def cases():
    c = {}
    # capacity and what only looks like it
    c["capacity_weights"] = Case(training(layers=40, width=64 * MIB), {"capacity"}, total=2 * GIB)
    c["capacity_activations"] = Case(training(layers=16, width=8 * MIB, act=96 * MIB), {"capacity"}, total=2 * GIB)
    c["capacity_optimizer"] = Case(training(layers=16, width=64 * MIB, act=2 * MIB), {"capacity"}, total=3300 * MIB,
                                   check=lambda j: any(o["category"] == "optimizer" for d in j["devices"] for o in d["owners_at_peak"]))
    c["capacity_protocol2"] = Case(training(layers=40, width=64 * MIB), {"capacity"}, total=2 * GIB, form="2")
    c["capacity_json"] = Case(training(layers=40, width=64 * MIB), {"capacity"}, total=2 * GIB, form="json")
    c["near_fits_just"] = Case(training(layers=16, width=8 * MIB, act=12 * MIB), {"none"}, total=2 * GIB)
    # fragmentation
    c["fragmentation_wobble_oom"] = Case(training(steps=14, layers=8, batch=wobble(3), act=40 * MIB, weird=True), {"fragmentation"},
                                         total=800 * MIB, advice=("expandable_segments:True",))
    c["fragmentation_pins_oom"] = Case(fragments(30, 64 * MIB, 2 * MIB, 300 * MIB), {"fragmentation"}, total=2048 * MIB,
                                       advice=("expandable_segments:True",))
    late_big = fragments(30, 64 * MIB, 2 * MIB, 0)
    for i in range(10):  # none of these fits a hole
        late_big.alloc(100 * MIB, forward_stack(late_big, i))
    c["fragmentation_end"] = Case(late_big, {"fragmentation"}, advice=("expandable_segments:True",), check=lambda j: j["devices"][0]["stuck_bytes"] > GIB)
    c["fragmentation_already_expandable"] = Case(fragments(60, 30 * MIB, 11 * MIB, 300 * MIB), {"fragmentation"}, total=1900 * MIB,
                                                 settings=Settings(expandable_segments=True), no_advice=("expandable_segments",))
    c["fragmentation_old_version"] = Case(fragments(30, 64 * MIB, 2 * MIB, 300 * MIB), {"fragmentation"}, total=2048 * MIB, old=True,
                                          no_advice=("expandable_segments",))
    c["fragmentation_no_history"] = Case(fragments(30, 64 * MIB, 2 * MIB, 0), {"fragmentation"}, history=False, no_advice=("",), unrecorded="not_recording")
    c["fragmentation_list_only"] = Case(fragments(30, 64 * MIB, 2 * MIB, 0), {"fragmentation"}, list_only=True, history=False, no_advice=("",), unrecorded="not_recording")
    cached = training(layers=8, width=4 * MIB, act=60 * MIB)
    c["near_cached_but_whole"] = Case(cached, {"none"})
    c["near_small_fragments"] = Case(fragments(3, 12 * MIB, 2 * MIB, 0), {"none"})
    # leaks
    c["leak"] = Case(training(steps=10, layers=4, leak=3 * MIB), {"leak"}, advice=("log_losses",))
    c["leak_small_often"] = Case(training(steps=30, layers=4, leak=300 * KIB), {"leak"})
    c["leak_to_oom"] = Case(training(steps=60, layers=4, leak=24 * MIB), {"leak"}, total=1 * GIB, advice=("log_losses",))
    c["leak_ring_overflow"] = Case(training(steps=40, layers=4, leak=3 * MIB), {"leak"}, keep_last=1000, unrecorded="overflow")
    c["near_cache_plateau"] = Case(plateau(14), {"none"})
    c["near_first_steps_only"] = Case(training(steps=12, layers=4), {"none"})
    c["near_batches_grow"] = Case(growing_batches(), {"none"})
    # spikes
    c["spike"] = Case(training(steps=5, layers=8, spike=600 * MIB), {"spike"}, advice=("attention_scores",))
    c["spike_second_peak"] = Case(training(steps=5, layers=8, width=16 * MIB, spike=900 * MIB), {"spike"})
    c["near_spike_small"] = Case(training(steps=5, layers=8, width=16 * MIB, spike=20 * MIB), {"none"})
    big_kept = training(steps=3, layers=6)
    big_kept.alloc(700 * MIB, user(big_kept, "/home/me/model.py:77:attention_scores"))
    c["near_spike_kept"] = Case(big_kept, {"none"})
    # one request
    one = training(steps=2, layers=4)
    one.alloc(10 * GIB, user(one, "/home/me/model.py:80:outer_product"))
    c["oversized_request"] = Case(one, {"oversized_request"}, check=lambda j: j["verdicts"][0]["bytes"] == 2 * GIB)
    huge = Program()
    huge.alloc(1 << 55, user(huge, "/home/me/model.py:81:oops"))
    c["oversized_first_request"] = Case(huge, {"oversized_request"})
    almost = training(steps=2, layers=16, width=16 * MIB)
    almost.alloc(8 * GIB - 100 * MIB, user(almost, "/home/me/model.py:80:outer_product"))
    c["near_oversized_but_capacity"] = Case(almost, {"capacity"})
    # others on the card
    c["other_processes_came"] = Case(others_grow(300 * MIB), {"other_processes"}, total=7 * GIB, advice=("stop what else",))
    c["other_processes_flag"] = Case(training(layers=16, width=64 * MIB, act=2 * MIB), {"other_processes"}, total=16 * GIB, others=13 * GIB,
                                     flags=("--device-memory", "16GiB"), advice=("stop what else",))
    c["near_others_little"] = Case(training(layers=200, width=64 * MIB), {"capacity"}, total=4 * GIB, others=300 * MIB,
                                   flags=("--device-memory", "4GiB"))
    # caps
    c["cap_below_device"] = Case(training(layers=16, width=64 * MIB, act=8 * MIB), {"cap_below_device"}, total=8 * GIB,
                                 settings=Settings(memory_fraction=0.25), flags=("--device-memory", "8GiB"), advice=("fraction",))
    c["cap_below_device_silent"] = Case(training(layers=16, width=64 * MIB, act=8 * MIB), {"cap_below_device"}, total=8 * GIB,
                                        settings=Settings(memory_fraction=0.25))
    c["near_cap_not_reached"] = Case(training(layers=4, width=4 * MIB), {"none"}, total=8 * GIB, settings=Settings(memory_fraction=0.5))
    c["near_cap_but_full"] = Case(training(layers=16, width=64 * MIB, act=8 * MIB), {"capacity"}, total=2048 * MIB,
                                  settings=Settings(memory_fraction=1.0))
    # pools
    c["pools_streams"] = Case(two_streams(500 * MIB, 40 * MIB), {"pools_cannot_share"}, total=2100 * MIB)
    c["pools_graphs"] = Case(graph_pools(500 * MIB, 12, 40 * MIB), {"pools_cannot_share"}, total=2100 * MIB)
    c["near_pools_fit"] = Case(two_streams(400 * MIB, 12 * MIB, count=1), {"none"}, total=4 * GIB)
    # truth about history
    c["late_recording"] = Case(late(training(steps=3, layers=6, width=32 * MIB), training(steps=3, layers=4)), {"none"}, unrecorded="not_recording")
    c["ring_overflow"] = Case(training(steps=20, layers=6), {"none"}, keep_last=700, unrecorded="overflow")
    c["no_history"] = Case(training(steps=3, layers=6), {"none"}, history=False, unrecorded="not_recording")
    c["late_and_capacity"] = Case(late(training(steps=2, layers=6, width=32 * MIB), training(layers=40, width=64 * MIB)), {"capacity"}, total=2 * GIB,
                                  unrecorded="not_recording")
    return c
