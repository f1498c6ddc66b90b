"""Train examples/train_text.py without a limit, under half and under a third of its own peak, and print one table."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20


def train(limit, folder):
    """One run under memfit; returns its row of the table and its peak in bytes."""
    report = folder / f"run-{limit}.json"
    flags = ["--quiet", "--report", str(report)] + ([f"--tensor-memory={limit}MiB"] if limit else [])
    command = [ROOT / "build/bin/memfit", "run", *flags, "--", sys.executable, ROOT / "examples/train_text.py"]
    print(f"training {f'under {limit} MiB' if limit else 'without a limit'} ...", file=sys.stderr, flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f"demo: the run ended with status {result.returncode}")
    said = json.loads(report.read_text())
    last = re.search(r"^final loss (\S+) weights (\w+)$", result.stdout, re.MULTILINE)
    if last is None:
        sys.exit(f"demo: the program did not say its loss:\n{result.stdout}")
    row = (f"{limit} MiB" if limit else "none", f"{said['peak_bytes'] / MIB:.1f} MiB", f"{said['wall_seconds']:.1f} s",
           str(said["evictions"]), last.group(1), last.group(2)[:16])
    return row, said["peak_bytes"]


def print_table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


def main():
    with tempfile.TemporaryDirectory(prefix="memfit-demo-") as name:
        folder = pathlib.Path(name)
        plain, peak = train(None, folder)
        half, third = peak // 2 // MIB, peak // 3 // MIB
        rows = [plain, train(half, folder)[0], train(third, folder)[0]]
    print("\nA small GPT on PyTorch's own documentation: limit on tensor bytes, highest tensor bytes, wall time, evictions,\n"
          "final loss, SHA-256 of the final weights (first 16 digits).\n")
    print_table([("limit", "peak", "time", "evictions", "loss", "weights"), *rows])
    if len({row[-1] for row in rows}) != 1:
        sys.exit("\ndemo: the weights differ, which must not be. Please report this machine and these lines.")
    print("\nThe same weights, bit for bit. Now yours:\n"
          f"  build/bin/memfit run --tensor-memory {half}MiB --report run.json -- python your_program.py")


if __name__ == "__main__":
    main()
