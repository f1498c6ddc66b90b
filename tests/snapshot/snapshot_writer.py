"""Turns what oracle_allocator recorded into files as PyTorch writes them: pickles of several protocols and JSON."""
from __future__ import annotations

import io
import json
import pickle
import random


class Stacks:
    """Stacks of shared frame dictionaries, as PyTorch's symbolizer makes them: the frames are shared, the lists are not."""

    def __init__(self):
        self.frames = {}

    def frame(self, filename, line, name):
        key = (filename, line, name)
        if key not in self.frames:
            self.frames[key] = {"name": name, "filename": filename, "line": line}
        return self.frames[key]

    def make(self, *parts):
        """parts: "file:line:function", innermost first."""
        out = []
        for p in parts:
            f, line, name = p.split(":", 2)
            out.append(self.frame(f, int(line), name))
        return out


PYTHON_TAIL = [
    "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py:1750:_wrapped_call_impl",
    "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py:1761:_call_impl",
]
CPP = [
    "??:0:c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(signed char, unsigned long, CUstream_st*)",
    "??:0:at::detail::empty_generic(c10::ArrayRef<long>, c10::Allocator*, c10::DispatchKeySet, c10::ScalarType)",
    "??:0:at::detail::empty_cuda(c10::ArrayRef<long>, c10::ScalarType, c10::optional<c10::Device>)",
    "??:0:at::native::empty_cuda(c10::ArrayRef<long>, c10::optional<c10::ScalarType>)",
    "??:0:torch::autograd::VariableType::addmm(at::Tensor const&, at::Tensor const&)",
    "??:0:torch::autograd::THPVariable_linear(_object*, _object*, _object*)",
]


def snapshot(allocators, settings, *, keep_last=None, annotations=None, extra=None, old=False, devices=None):
    """The dictionary of torch.cuda.memory._snapshot(). keep_last: the ring held only so many events (per device)."""
    segments, traces = [], []
    for a in allocators:
        segments.extend(a.segments())
        events = a.events if keep_last is None else a.events[-keep_last:]
        trace = []
        for e in events:
            e = dict(e)
            # The symbolizer gives every event its own list of shared frames.
            e["frames"] = list(e["frames"]) if e["frames"] else []
            if old:
                e.pop("pool_id", None)
            else:
                e["compile_context"] = "N/A"
                e["user_metadata"] = ""
            trace.append(e)
        traces.append(trace)
    out = {"segments": segments, "device_traces": traces}
    if not old:
        out["allocator_settings"] = allocator_settings(settings)
        out["external_annotations"] = annotations or []
    if extra:
        out.update(extra)
    return out


def allocator_settings(s):
    return {
        "PYTORCH_CUDA_ALLOC_CONF": s.conf(),
        "max_split_size": -1 if s.max_split_size is None else s.max_split_size,
        "garbage_collection_threshold": s.garbage_collection_threshold,
        "expandable_segments": s.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << i): s.roundup_power2_divisions for i in range(16)},
    }


def write(snap, path, form="4"):
    """form: "2" ... "5" (pickle protocols), "5-noframe", or "json"."""
    if form == "json":
        with open(path, "w") as f:
            json.dump(snap, f, default=lambda o: list(o))
    elif form == "sparse":  # protocol 2 with memo indices far apart, as an optimizer of pickles may leave them
        import pickletools
        data = pickle.dumps(snap, protocol=2)
        with open(path, "wb") as f:
            f.write(respread(data))
    else:
        with open(path, "wb") as f:
            pickle.dump(snap, f, protocol=int(form))


def respread(data, stride=1009):
    """Rewrite BINPUT/LONG_BINPUT/BINGET/LONG_BINGET with indices that are far apart."""
    import pickletools
    out = io.BytesIO()
    ops = list(pickletools.genops(data))
    for (op, arg, pos), nxt in zip(ops, ops[1:] + [(None, None, len(data))]):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            out.write(b"r" + (arg * stride + 7).to_bytes(4, "little"))
        elif op.name in ("BINGET", "LONG_BINGET"):
            out.write(b"j" + (arg * stride + 7).to_bytes(4, "little"))
        else:
            out.write(data[pos:nxt[2]])
    return out.getvalue()
