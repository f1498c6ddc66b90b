#!/usr/bin/env python3
"""The results of drive.py as a markdown table. Usage: table.py [--into README.md] [FILE...]

Without files: every bench/results/step_cost_*.json. --into puts it between the lines <!-- numbers:begin --> and <!-- numbers:end -->.
"""
import argparse
import glob
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
MIB = 1 << 20
HEADER = ("| model | mode | peak MiB | of eager's | step ms, median (min to max) | of eager's | evictions | recompute | search | "
          "loss, gradients, buffers as eager's |")


def peak_of(row, result):
    if row["mode"] == "eager":
        return result["eager_peak_bytes"]
    if row["mode"] == "checkpoint":
        return result["checkpoint_peak_bytes"]
    return row.get("peak_bytes")


def name_of(result):
    return result["model"] + (" in C++" if result.get("language") == "C++" else "")


def cells(row, result):
    peak = peak_of(row, result)
    yield name_of(result)
    yield row["mode"]
    yield f"{peak / MIB:.1f}" if peak else "not measured"
    yield f"{peak / result['eager_peak_bytes']:.2f}" if peak else ""
    if "median_ms" not in row:
        yield "refused" if row["refused"] else f"failed: {(row['error'] or 'no reason given').splitlines()[0][:80]}"
        yield from [""] * 5
        return
    yield f"{row['median_ms']:.0f} ({row['min_ms']:.0f} to {row['max_ms']:.0f})" + (", then refused" if row["refused"] else "")
    yield f"{row['ratio']:.2f}x"
    if "evictions" in row:
        yield str(row["evictions"])
        yield f"{row['recompute_share']:.1%}"
        yield f"{row['search_share']:.2%}"
    else:
        yield from [""] * 3
    yield ", ".join("yes" if row[key + "_equal"] else "no" for key in ("loss", "gradients", "buffers"))


def table(results):
    first = results[0]
    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for result in results:
        lines += ["| " + " | ".join(cells(row, result)) + " |" for row in result["modes"]]
    dates = sorted(result["date"][:10] for result in results)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    machine = first["machine"]
    lines += ["", f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_bytes'] / 2**30:.0f} GiB; torch {first['torch_version']}, "
              f"{first['threads']} threads; {when}. Evictions, recompute and search are of all steps of a run, warm-ups included."]
    lines += ["", *(f"{name_of(result)}: {result['remark']}" for result in results if result.get("remark"))]
    return "\n".join(lines).rstrip()


def put_into(path, text):
    with open(path) as file:
        old = file.read()
    begin, end = old.find(BEGIN), old.find(END)
    if begin < 0 or end < begin:
        sys.exit(f"table.py: {path} has no lines {BEGIN} and {END}; add them where the table is to stand")
    with open(path, "w") as file:
        file.write(old[:begin + len(BEGIN)] + "\n" + text + "\n" + old[end:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=sorted(glob.glob(os.path.join(ROOT, "bench/results/step_cost_*.json"))))
    parser.add_argument("--into")
    args = parser.parse_args()
    if not args.files:
        sys.exit("table.py: no results yet; run bench/step_cost/drive.py gpt first")
    results = []
    for path in args.files:
        with open(path) as file:
            results.append(json.load(file))
    text = table(results)
    if args.into:
        put_into(args.into, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
