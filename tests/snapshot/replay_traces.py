"""The traces of the replay validation: name -> (program, settings, device bytes, what to do when it runs out)."""
import random

from workloads import GIB, KIB, MIB, Settings, chaos, training

wobble = random.Random(7)
BATCHES = [wobble.choice([5, 6, 7, 8, 9, 10]) for _ in range(64)]


def traces():
    t = {}
    t["train_plain"] = (training(), Settings(), 8 * GIB, "stop")
    t["train_expandable"] = (training(), Settings(expandable_segments=True), 8 * GIB, "stop")
    t["train_wobble"] = (training(steps=12, batch=lambda s: BATCHES[s], act=24 * MIB, weird=True), Settings(), 8 * GIB, "stop")
    t["train_wobble_expandable"] = (training(steps=12, batch=lambda s: BATCHES[s], act=24 * MIB, weird=True),
                                    Settings(expandable_segments=True), 8 * GIB, "stop")
    t["train_wobble_retries"] = (training(steps=16, batch=lambda s: BATCHES[s], act=24 * MIB, weird=True), Settings(), 980 * MIB, "half")
    t["train_wobble_oom"] = (training(steps=16, batch=lambda s: BATCHES[s], act=40 * MIB, weird=True), Settings(), 900 * MIB, "stop")
    t["train_split_limit"] = (training(steps=12, batch=lambda s: BATCHES[s], act=40 * MIB, weird=True),
                              Settings(max_split_size=64 * MIB), 3 * GIB, "half")
    t["train_split_limit_tight"] = (training(steps=12, batch=lambda s: BATCHES[s], act=40 * MIB, weird=True),
                                    Settings(max_split_size=32 * MIB), 1 * GIB, "half")
    t["train_roundup"] = (training(steps=10, batch=lambda s: BATCHES[s], act=24 * MIB, weird=True),
                          Settings(roundup_power2_divisions=8), 8 * GIB, "stop")
    t["train_roundup_expandable"] = (training(steps=10, batch=lambda s: BATCHES[s], act=24 * MIB, weird=True),
                                     Settings(roundup_power2_divisions=4, expandable_segments=True), 8 * GIB, "stop")
    t["train_empty_cache"] = (training(steps=10, batch=lambda s: BATCHES[s], act=24 * MIB, empty_every=2), Settings(), 8 * GIB, "stop")
    t["train_empty_cache_expandable"] = (training(steps=10, batch=lambda s: BATCHES[s], act=24 * MIB, empty_every=3),
                                         Settings(expandable_segments=True), 8 * GIB, "stop")
    t["train_comm_stream"] = (training(steps=8, comm_stream=0x55aa00, act=8 * MIB), Settings(), 8 * GIB, "stop")
    t["chaos"] = (chaos(6000, 1), Settings(), 24 * GIB, "stop")
    t["chaos_tight"] = (chaos(6000, 2), Settings(), 700 * MIB, "half")
    t["chaos_streams"] = (chaos(6000, 3, streams=(0, 7, 11), delays=(0, 0, 0, 4)), Settings(), 1000 * MIB, "half")
    t["chaos_expandable"] = (chaos(6000, 4, streams=(0, 7)), Settings(expandable_segments=True), 24 * GIB, "stop")
    t["chaos_expandable_tight"] = (chaos(6000, 5, streams=(0, 7), delays=(0, 0, 6)), Settings(expandable_segments=True), 900 * MIB, "half")
    t["chaos_split"] = (chaos(6000, 6, top=28, delays=(0, 0, 5)), Settings(max_split_size=40 * MIB), 3 * GIB, "half")
    t["chaos_split_rounding"] = (chaos(6000, 8, top=28), Settings(max_split_size=40 * MIB, max_non_split_rounding=64 * MIB), 3 * GIB, "half")
    t["chaos_pools"] = (chaos(6000, 9, pools=((0, 0), (0, 1), (3, 0))), Settings(), 1500 * MIB, "half")
    t["chaos_gc"] = (chaos(6000, 10), Settings(garbage_collection_threshold=0.6, memory_fraction=0.5), 4 * GIB, "half")
    t["chaos_gc_split"] = (chaos(6000, 11, top=28), Settings(garbage_collection_threshold=0.5, memory_fraction=0.7, max_split_size=64 * MIB),
                           4 * GIB, "half")
    t["chaos_fraction"] = (chaos(6000, 12), Settings(memory_fraction=0.22), 4 * GIB, "half")
    t["chaos_roundup"] = (chaos(6000, 13), Settings(roundup_power2_divisions=16), 1200 * MIB, "half")
    t["chaos_large_segment"] = (chaos(6000, 14), Settings(large_segment=64 * MIB), 760 * MIB, "half")
    t["chaos_expandable_large_segment"] = (chaos(6000, 15), Settings(large_segment=40 * MIB, expandable_segments=True), 860 * MIB, "half")
    t["chaos_empty"] = (chaos(6000, 16, empty=0.01, delays=(0, 3)), Settings(), 4 * GIB, "half")
    return t
