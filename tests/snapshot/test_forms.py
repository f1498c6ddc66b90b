#!/usr/bin/env python3
"""Every form of the same snapshot gives the same answer; windows, ranks and diffs add up; bad input is refused with exit
status 4, in bounded time and memory. Usage: test_forms.py MEMFIT"""
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from oracle_allocator import GIB, KIB, MIB, Allocator, Device, Settings  # noqa: E402
from snapshot_writer import snapshot, write  # noqa: E402
from verdict_cases import cases  # noqa: E402
from workloads import run, training  # noqa: E402

MEMFIT = sys.argv[1]
failures = []


def expect(good, what):
    print("ok  " if good else "BAD ", what, flush=True)
    if not good:
        failures.append(what)


def call(*args, limit=None):
    before = (lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) if limit else None
    return subprocess.run([MEMFIT, *args], capture_output=True, preexec_fn=before, timeout=120)


def data(*args):
    done = call(*args, "--json")
    if done.returncode:
        raise SystemExit(f"{args}: {done.returncode} {done.stderr.decode()}")
    return json.loads(done.stdout)


def stripped(j):
    for key in ("file", "file_bytes", "format"):
        j.pop(key)
    return j


def recorded(program, settings=None, total=8 * GIB, index=0):
    a = Allocator(Device(total), settings or Settings(), index)
    run(program, a)
    return a


def forms(tmp):
    a = recorded(training(steps=4), Settings(max_split_size=64 * MIB, roundup_power2_divisions=4))
    snap = snapshot([a], a.set)
    answers = {}
    for form in ("2", "3", "4", "5", "sparse", "json"):
        path = os.path.join(tmp, "form_" + form)
        write(snap, path, form)
        answers[form] = stripped(data("explain", path))
    expect(all(v == answers["4"] for v in answers.values()), f"{len(answers)} forms give one answer")
    # Python's slower pickler and an optimized pickle are different byte streams of the same objects.
    import pickletools
    raw = pickle.dumps(snap, protocol=4)
    for name, blob in (("python pickler", pure_python(snap)), ("optimized", pickletools.optimize(raw))):
        path = os.path.join(tmp, "form_x")
        with open(path, "wb") as f:
            f.write(blob)
        expect(stripped(data("explain", path)) == answers["4"], f"{name} gives the same answer")
    path = os.path.join(tmp, "schnappschuß_\u4e2d.pickle")
    write(snap, path)
    expect(stripped(data("explain", path)) == answers["4"], "a path that is not ASCII")
    extra = dict(snap, host_traces=[[1, 2]], something={"new": [1, {"deep": None}]})
    extra["device_traces"] = [[dict(e, colour="red") for e in snap["device_traces"][0]]]
    write(extra, path)
    got = data("explain", path)
    unknown = got.pop("unknown_fields")
    expect(unknown.get("event.colour") == len(a.events) and unknown.get("snapshot.something") == 1, "unknown fields are kept and counted")
    plain = dict(answers["4"])
    plain.pop("unknown_fields")
    expect(stripped(got) == plain, "and change nothing else")


def pure_python(snap):
    out = io.BytesIO()
    pickle._Pickler(out, protocol=4).dump(snap)
    return out.getvalue()


def windows(tmp):
    a = recorded(training(steps=8, spike=300 * MIB))
    path = os.path.join(tmp, "w.pickle")
    write(snapshot([a], a.set), path)
    whole = data("explain", path)["devices"][0]
    n = whole["events"]
    part = data("explain", path, "--from", str(n // 2), "--to", str(n // 2 + 50))["devices"][0]
    expect(part["events_left_out"] == n - 50 and n // 2 <= part["peak_event"] < n // 2 + 50, "--from and --to bound the peak and count what is left out")
    expect(sum(o["bytes"] for o in part["owners_at_peak"]) == part["peak_allocated_bytes"], "owners add up inside a window")
    last = data("explain", path, "--last-step")["devices"][0]
    expect(last["window"][0] > n // 2 and last["peak_allocated_bytes"] <= whole["peak_allocated_bytes"], "--last-step looks at the end")
    small = data("explain", path, "--min-size", "4MiB")["devices"][0]
    expect(sum(o["bytes"] for o in small["owners_at_peak"]) == small["peak_allocated_bytes"] and small["events_left_out"] > 0,
           "--min-size leaves blocks out, says how many, and the sum stays")
    # The peak inside a window, recomputed from the oracle's own events.
    live, cur, best = {}, 0, 0
    sizes = block_sizes(a)
    for i, e in enumerate(a.events):
        if e["action"] == "alloc":
            live[e["addr"]] = sizes[i]
            cur += sizes[i]
        elif e["action"] == "free_requested":
            cur -= live.pop(e["addr"])
        if n // 2 <= i < n // 2 + 50:
            best = max(best, cur)
    expect(best == part["peak_allocated_bytes"], "the window's peak is the oracle's")
    expect(call("explain", path, "--from", "9", "--to", "3").returncode == 2, "--from after --to is a usage error")


def block_sizes(a):
    """Sizes of blocks as an allocator without splitting surprises gives them: a second run that notes them."""
    again = Allocator(Device(a.dev.total), a.set, a.index)
    sizes = {}
    original = again.record

    def record(action, addr, size, stream, stack, pool_id):
        if action == "alloc":
            sizes[len(again.events)] = again.used[addr].size
        original(action, addr, size, stream, stack, pool_id)

    again.record = record
    run(training(steps=8, spike=300 * MIB), again)
    return sizes


def parts_missing(tmp):
    a = recorded(training(steps=4))
    path = os.path.join(tmp, "m.pickle")
    snap = snapshot([a], a.set)
    write(snap, path)
    whole = data("explain", path)
    for name, change in (("segments", {"segments": []}), ("settings", {"allocator_settings": {}}), ("annotations", {"external_annotations": []})):
        write(dict(snap, **change), path)
        got = data("explain", path)["devices"][0]
        expect(got["peak_allocated_bytes"] == whole["devices"][0]["peak_allocated_bytes"] and not got["violations"], f"without {name} the peak is the same")
    cut = snapshot([a], a.set, keep_last=300)
    write(dict(cut, segments=[]), path)
    got = data("explain", path)["devices"][0]
    expect(not got["shows_segments"] and not got["violations"] and sum(o["bytes"] for o in got["owners_at_peak"]) == got["peak_allocated_bytes"],
           "a cut history without segments still adds up")
    for s in snap["segments"]:
        s.pop("blocks")
    write(snap, path)
    got = data("explain", path)["devices"][0]
    expect(got["peak_allocated_bytes"] == whole["devices"][0]["peak_allocated_bytes"], "segments without blocks give what they can")
    write({"device_traces": snap["device_traces"]}, path)
    expect(data("explain", path)["devices"][0]["events"] == len(a.events), "traces alone are read")


def ranks_and_diff(tmp):
    paths = []
    for r in range(4):
        a = recorded(training(steps=4, layers=8, width=8 * MIB, act=(2 if r != 2 else 12) * MIB))
        paths.append(os.path.join(tmp, f"rank{r}.pickle"))
        write(snapshot([a], a.set), paths[-1])
    got = data("explain", *paths)
    expect(len(got["ranks"]) == 4 and got["odd"] == paths[2], "the odd rank is found")
    by = {r["file"]: r["peak_allocated_bytes"] for r in got["ranks"]}
    expect(sum(d["bytes"] for d in got["differences"]) == by[got["odd"]] - by[got["typical"]], "rank differences add up")
    even = data("explain", *[p for i, p in enumerate(paths) if i != 2])
    expect(even["odd"] is None, "equal ranks have no odd one")
    d = data("diff", paths[0], paths[2])
    expect(d["delta_peak_bytes"] == by[paths[2]] - by[paths[0]] and sum(r["bytes"] for r in d["rows"]) == d["delta_peak_bytes"], "diff rows add up")
    expect(data("diff", paths[0], paths[0])["rows"] == [], "a file does not differ from itself")
    leak = recorded(training(steps=8, layers=8, width=8 * MIB, act=2 * MIB, leak=5 * MIB))
    path = os.path.join(tmp, "leaky.pickle")
    write(snapshot([leak], leak.set), path)
    rows = data("diff", paths[0], path)["rows"]
    expect(rows[0]["where"].startswith("train.py:60") and rows[0]["persistent"], "a leak shows as a persistent row")
    # Two devices in one file: one runs out, the other does not.
    good = recorded(training(), index=0)
    bad = recorded(training(layers=40, width=64 * MIB), total=2 * GIB, index=1)
    path = os.path.join(tmp, "two.pickle")
    write(snapshot([good, bad], Settings()), path)
    got = data("explain", path)
    expect([(v["device"], v["kind"]) for v in got["verdicts"]] == [(0, "none"), (1, "capacity")], "devices are judged one by one")
    expect([d["reserved_bytes"] for d in got["devices"]] == [good.reserved, bad.reserved], "each device has its own bytes")


def page(tmp):
    case = cases()["fragmentation_wobble_oom"]
    a = Allocator(Device(case.total), case.settings)
    run(case.program, a)
    path = os.path.join(tmp, "page.pickle")
    write(snapshot([a], a.set), path)
    done = call("report", path, "--html")
    html = open(path + ".html").read() if done.returncode == 0 else ""
    expect(done.returncode == 0 and "Fragmentation:" in html and "uPlot" in html, "report writes a page with the verdict")
    expect("http://" not in html.split("<script>")[0] and "src=" not in html.split("<script>")[0], "the page needs no network")
    expect(call("report", path, "--html").returncode != 0, "report does not overwrite")
    expect(call("report", path, "--html", "--force").returncode == 0, "unless told to")


def bad_inputs(tmp):
    a = recorded(training(steps=2))
    raw = pickle.dumps(snapshot([a], a.set), protocol=4)
    huge = snapshot([a], a.set)
    huge["device_traces"][0][5] = dict(huge["device_traces"][0][5], size=2 ** 64 - 1)
    more = snapshot([a], a.set)
    more["device_traces"][0][5] = dict(more["device_traces"][0][5], size=2 ** 200)
    long_name = snapshot([a], a.set)
    long_name["device_traces"][0][5]["frames"] = [{"name": "n" * 70_000, "filename": "/x/\u00fc\u4e2d.py", "line": 1}]

    class Evil:
        def __reduce__(self):
            return (os.system, ("touch " + os.path.join(tmp, "owned"),))

    inputs = {
        "empty": b"",
        "text": b"hello world\n",
        "zip": b"PK\x03\x04" + bytes(100),
        "an object with code": pickle.dumps({"segments": [], "device_traces": [[Evil()]]}),
        "an instance": pickle.dumps({"segments": [], "x": complex(1, 2)}),
        "truncated": raw[: len(raw) // 2],
        "without its last byte": raw[:-1],
        "a forged string length": b"\x80\x04\x8d" + struct.pack("<Q", 2 ** 62) + b"abc",
        "a forged bytes length": b"\x80\x04\x8e" + struct.pack("<Q", 2 ** 63 - 1) + b"abc",
        "a forged frame": b"\x80\x04\x95" + struct.pack("<Q", 2 ** 64 - 1) + raw[11:],
        "a forged memo index": b"\x80\x04]j\xff\xff\xff\xff.",
        "a forged long": b"\x80\x04\x8b\xff\xff\xff\x7f",
        "a size of 2^64-1": pickle.dumps(huge),
        "a size of 2^200": pickle.dumps(more),
        "a million marks": b"\x80\x04" + b"(" * 3_000_000 + b".",
        "a million empty lists": b"\x80\x04(" + b"]" * 5_000_000 + b"e.",
        "a million duplicates": b"\x80\x04]" + b"2" * 5_000_000 + b".",
        "nested lists": b"\x80\x04" + b"](" * 900_000 + b"e" * 900_000 + b".",
        "nested JSON": b"[" * 2_000_000,
        "a list of numbers": pickle.dumps(list(range(1000))),
        "another dictionary": pickle.dumps({"a": 1}),
        "protocol 9": b"\x80\x09}.",
        "JSON cut short": json.dumps(snapshot([a], a.set), default=list)[:5000].encode(),
    }
    for name, blob in inputs.items():
        path = os.path.join(tmp, "bad")
        with open(path, "wb") as f:
            f.write(blob)
        start = time.time()
        done = call("explain", path, limit=2 * GIB)
        took = time.time() - start
        message = done.stderr.decode(errors="replace")
        expect(done.returncode == 4 and "at byte" in message and took < 20, f"{name}: exit {done.returncode} in {took:.2f} s: {message.strip()[:110]}")
    expect(not os.path.exists(os.path.join(tmp, "owned")), "nothing was executed")
    expect(call("explain", os.path.join(tmp, "absent")).returncode == 4, "a missing file")
    expect(call("explain", tmp).returncode == 4, "a folder")
    path = os.path.join(tmp, "long")
    with open(path, "wb") as f:
        f.write(pickle.dumps(long_name, protocol=4))
    done = call("explain", path, "--json")
    expect(done.returncode == 0 and len(done.stdout) < 200_000 and json.loads(done.stdout) is not None, "a name of 70,000 letters is cut, not fatal")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        forms(tmp)
        windows(tmp)
        parts_missing(tmp)
        ranks_and_diff(tmp)
        page(tmp)
        bad_inputs(tmp)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
