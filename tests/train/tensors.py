"""Safetensors files, read and written with torch and json only: an independent reading of the format."""
import json
import struct

import torch

WORDS = {torch.float32: "F32", torch.int64: "I64", torch.float64: "F64", torch.bool: "BOOL", torch.uint8: "U8"}


def write(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)


def read(path):
    types = {word: dtype for dtype, word in WORDS.items()}
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = bytearray(data[begin:end])
        tensor = torch.frombuffer(raw, dtype=types[entry["dtype"]]) if raw else torch.empty(0, dtype=types[entry["dtype"]])
        out[name] = tensor.reshape(entry["shape"])
    return out
