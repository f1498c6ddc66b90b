#!/usr/bin/env python3
"""Runs the exactness zoo: every program plain and under `memfit run` at several limits, compared bit by bit.

For each program: plain twice (the program itself must be deterministic; cached), once under memfit without a limit (which
gives its peak), then once at each fraction of that peak. Prints one line a run, a table, and "N passed, N failed".
Needs nothing but the standard library; the programs need torch (--python). See README.md beside this file.
"""
import argparse
import ast
import concurrent.futures
import dataclasses
import fnmatch
import glob
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PASSES = ("exact", "refused", "small")  # small: too few tensor bytes for a limit to mean anything
SMALLEST_PEAK = 1 << 20


@dataclasses.dataclass
class Program:
    name: str
    command: list
    sources: list
    accounting_only: bool = False


@dataclasses.dataclass
class Outcome:
    status: int
    seconds: float
    hung: bool
    stderr: str
    result: dict | None  # what the program's recorder wrote
    reports: list  # memfit's reports, of the program and of its ranks


@dataclasses.dataclass
class Run:
    program: str
    setting: str  # "unlimited", "0.60", ...
    verdict: str
    limit: int | None = None
    detail: str = ""
    seconds: float = 0.0
    peak: int | None = None
    unlimited_peak: int | None = None
    resident: int | None = None
    fixed: int | None = None
    evictions: int = 0
    recomputed_ops: int = 0
    recompute_seconds: float = 0.0
    least_limit: int | None = None

    @property
    def passed(self):
        return self.verdict in PASSES


def python_programs(python):
    for path in sorted(glob.glob(os.path.join(HERE, "python", "*.py"))):
        name = os.path.basename(path)[:-3]
        if name == "zoo":
            continue
        variants, accounting_only = [[]], False
        with open(path) as file:
            for node in ast.parse(file.read()).body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    if node.targets[0].id == "VARIANTS":
                        variants = ast.literal_eval(node.value)
                    elif node.targets[0].id == "ACCOUNTING_ONLY":
                        accounting_only = ast.literal_eval(node.value)
        for words in variants:
            yield Program(f"py/{'-'.join([name, *words])}", [python, path, *words],
                          [path, os.path.join(HERE, "python", "zoo.py")], accounting_only)


def cpp_programs(binary, modules):
    if not os.path.exists(binary):
        return
    listing = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout
    for name in listing.split():
        yield Program(f"cpp/{name}", [binary, name, "--modules", modules], [binary])


def is_stopped(pid):
    """Whether the process is stopped (SIGSTOP): such time is not its own and does not count towards a hang."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def descendants(pid):
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(entry))
            except OSError:
                pass
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def wait_or_stop(process, timeout):
    """True when the process ended by itself; else it and all its children are ended here."""
    used, last = 0.0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        if not any(is_stopped(pid) for pid in [process.pid, *(descendants(process.pid) if used > timeout / 2 else [])]):
            used += min(now - last, 1.0)  # a jump means that this process was stopped itself
        last = now
        if used > timeout:
            for pid in [*descendants(process.pid), process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
            return False
    return True


class Zoo:
    def __init__(self, options):
        self.options = options
        self.memfit_text = None
        os.makedirs(os.path.join(options.build, "zoo", "baselines"), exist_ok=True)

    def execute(self, program, flags=None):
        """Run once; plain when `flags` is None, else under memfit with them."""
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            digest, report = os.path.join(folder, "digest.json"), os.path.join(folder, "report.json")
            command = [*program.command, "--digest", digest]
            if flags is not None:
                command = [self.options.memfit, "run", "--report", report, *flags, "--", *command]
            environment = dict(os.environ, OMP_NUM_THREADS=str(self.options.threads), PYTHONDONTWRITEBYTECODE="1", TMPDIR=folder,
                               TORCHINDUCTOR_CACHE_DIR=os.path.join(self.options.build, "zoo", "inductor"))
            begin = time.monotonic()
            with open(os.path.join(folder, "stderr"), "w+") as errors:
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
                hung = not wait_or_stop(process, self.options.timeout)
                seconds = time.monotonic() - begin
                errors.seek(0)
                text = errors.read()
            result, reports = None, []
            if os.path.exists(digest):
                with open(digest) as file:
                    result = json.load(file)
            for path in sorted(glob.glob(os.path.join(folder, "report*.json"))):
                with open(path) as file:
                    reports.append(json.load(file))
            return Outcome(process.returncode, seconds, hung, text, result, reports)

    def baseline(self, program):
        """The program's own digests, or the reason why it cannot serve: (result, reason, seconds)."""
        hasher = hashlib.sha256(f"{self.options.threads} {program.command} {self.torch_version()}".encode())
        for path in program.sources:
            with open(path, "rb") as file:
                hasher.update(file.read())
        path = os.path.join(self.options.build, "zoo", "baselines", program.name.replace("/", "-") + ".json")
        if os.path.exists(path):
            with open(path) as file:
                stored = json.load(file)
            if stored["key"] == hasher.hexdigest():
                return stored["result"], "", stored["seconds"]
        results = []
        for _ in range(2):
            outcome = self.execute(program)
            if outcome.hung or outcome.status != 0 or outcome.result is None:
                return None, f"plain run failed with {outcome.status}: {last_line(outcome.stderr)}", outcome.seconds
            results.append(outcome.result)
        difference = first_difference(results[0]["entries"], results[1]["entries"])
        if difference:
            return None, f"not deterministic by itself: {difference}", outcome.seconds
        with open(path, "w") as file:
            json.dump({"key": hasher.hexdigest(), "result": results[0], "seconds": outcome.seconds}, file)
        return results[0], "", outcome.seconds

    def torch_version(self):
        if self.memfit_text is None:
            path = glob.glob(os.path.join(os.path.dirname(os.path.dirname(self.options.python)), "lib", "python*", "site-packages", "torch", "version.py"))
            with open(path[0]) if path else open(os.devnull) as file:
                self.memfit_text = file.read()
        return self.memfit_text

    def judge(self, program, setting, flags, baseline, limit=None, resident_limit=None, fraction=None, peak=None):
        if self.options.verify:
            flags = [*flags, "--verify"]
        outcome = self.execute(program, flags)
        run = Run(program.name, setting, "exact", limit or resident_limit, seconds=outcome.seconds, fixed=baseline["fixed_bytes"])
        numbers = [r for r in outcome.reports if r.get("attached")]
        run.peak = max((r["peak_bytes"] for r in numbers), default=None)
        run.unlimited_peak = max((r["unlimited_peak_bytes"] or 0 for r in numbers), default=None)
        run.evictions = sum(r["evictions"] or 0 for r in numbers)
        run.recomputed_ops = sum(r["recomputed_ops"] or 0 for r in numbers)
        run.recompute_seconds = sum(r["recompute_seconds"] or 0.0 for r in numbers)
        run.least_limit = max((r["least_limit_bytes"] or 0 for r in numbers), default=None) or None
        # The program's own look at VmHWM, beside what the report says; ranks report their own.
        run.resident = max([r["peak_rss_bytes"] or 0 for r in numbers] + [(outcome.result or {}).get("hwm_bytes", 0)])
        self.classify(run, program, outcome, numbers, baseline, limit, resident_limit, fraction, peak)
        return run

    def classify(self, run, program, outcome, numbers, baseline, limit, resident_limit, fraction, peak):
        verify_failures = sum(r["verify_failures"] or 0 for r in numbers)
        refusals = sum(r["refusals"] or 0 for r in numbers)
        if outcome.hung:
            run.verdict, run.detail = "HANG", f"not done after {self.options.timeout} s"
        elif limit is not None and run.peak is not None and run.peak > limit:
            run.verdict, run.detail = "OVER", f"peak {run.peak} over {limit}"
        elif resident_limit is not None and run.resident > resident_limit and outcome.status != 3:
            run.verdict, run.detail = "OVER", f"resident {run.resident} over {resident_limit}"
        elif outcome.status == 3 or (outcome.status > 0 and refusals > 0 and "OutOfMemoryError" in outcome.stderr):
            run.verdict = "refused"
            run.detail = f"needs at least {run.least_limit}"
            if "smallest limit" not in outcome.stderr and "at least" not in outcome.stderr:
                run.verdict, run.detail = "CRASH", "refused without naming a limit: " + last_line(outcome.stderr)
            elif fraction and fraction >= 0.6 and not program.accounting_only and baseline["fixed_bytes"] < peak / 2:
                run.verdict = "REFUSED"  # its fixed part is under half its peak: it should have fitted
        elif verify_failures:
            run.verdict, run.detail = "WRONG", f"{verify_failures} values differ from their checksums: {last_line(outcome.stderr)}"
        elif outcome.status != 0 or outcome.result is None:
            run.verdict, run.detail = "CRASH", f"status {outcome.status}: {last_line(outcome.stderr)}"
        elif not numbers:
            run.verdict, run.detail = "CRASH", "memfit was not attached"
        else:
            difference = first_difference(baseline["entries"], outcome.result["entries"])
            if difference:
                run.verdict, run.detail = "WRONG", difference
            elif outcome.result["out_of_memory_caught"] != baseline["out_of_memory_caught"]:
                run.verdict, run.detail = "WRONG", "the program caught another number of OutOfMemoryErrors"

    def unlimited(self, program, baseline):
        return self.judge(program, "unlimited", [], baseline)

    def limited(self, program, baseline, unlimited, fraction):
        peak = unlimited.unlimited_peak or unlimited.peak or 0
        setting = f"{fraction:.2f}"
        if peak < SMALLEST_PEAK:
            return Run(program.name, setting, "small", detail=f"peak only {peak} bytes", fixed=baseline["fixed_bytes"])
        if self.options.memory:
            limit = int(unlimited.resident - (1 - fraction) * peak)
            return self.judge(program, setting, ["--memory", f"{limit}B"], baseline, resident_limit=limit, fraction=fraction, peak=peak)
        limit = int(fraction * peak)
        return self.judge(program, setting, ["--tensor-memory", f"{limit}B"], baseline, limit=limit, fraction=fraction, peak=peak)


def last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error|error|memfit:|terminate|what\(\)", line)]
    return (errors or lines or [""])[-1][:300]


def first_difference(wanted, got):
    for mine, other in zip(wanted, got):
        if mine != other:
            return f"step {mine[0]} {mine[1]}" + ("" if mine[:2] == other[:2] else f" (there: {other[0]} {other[1]})")
    return "" if len(wanted) == len(got) else f"{len(wanted)} entries and {len(got)}"


def mib(count):
    return "" if count is None else f"{count / 2**20:.1f}"


def say(run):
    extra = f"  {run.detail}" if run.detail else ""
    print(f"{run.verdict:8} {run.program:36} {run.setting:>9}  peak {mib(run.peak):>6}  limit {mib(run.limit):>6}  {run.evictions:6} evictions "
          f"{run.recomputed_ops:6} recomputed  {run.seconds:5.1f} s{extra}", flush=True)


def print_table(runs):
    settings = sorted({run.setting for run in runs}, key=lambda s: (s != "unlimited", s), reverse=False)
    rows = {}
    for run in runs:
        rows.setdefault(run.program, {}).setdefault(run.setting, []).append(run.verdict)
    print(f"\n{'program':36} " + " ".join(f"{s:>9}" for s in settings))
    for name, cells in rows.items():
        print(f"{name:36} " + " ".join(f"{'/'.join(sorted(set(cells.get(s, ['']))))[:9]:>9}" for s in settings))
    counts = {}
    for run in runs:
        counts[run.verdict] = counts.get(run.verdict, 0) + 1
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=os.path.join(ROOT, "build"), help="build folder (default: build)")
    parser.add_argument("--memfit", help="the memfit binary (default: BUILD/bin/memfit)")
    parser.add_argument("--cpp", help="the C++ zoo (default: BUILD/bin/zoo_cpp; left out when it is not there)")
    parser.add_argument("--python", default=os.environ.get("MEMFIT_PYTHON", os.path.join(ROOT, ".venv", "bin", "python")))
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="programs to run, e.g. 'py/gpt*' (repeatable)")
    parser.add_argument("--quick", action="store_true", help="the subset that stands for the kinds")
    parser.add_argument("--limits", default="0.8,0.6,0.4,0.3", help="fractions of each program's own peak")
    parser.add_argument("--sweep", type=int, metavar="N", help="instead: N random pairs of program and limit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", action="store_true", help="run with --verify")
    parser.add_argument("--memory", action="store_true", help="limit resident memory instead of tensor bytes")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 2)))
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="OUT", help="write every run there")
    parser.add_argument("--plain", action="store_true", help="only the control: is each program deterministic by itself")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    options.memfit = os.path.abspath(options.memfit or os.path.join(options.build, "bin", "memfit"))
    options.cpp = os.path.abspath(options.cpp or os.path.join(options.build, "bin", "zoo_cpp"))
    return options


QUICK = ("py/gpt_sdpa", "py/cnn_batchnorm", "py/lstm_packed", "py/inplace_activations", "py/random_ops_own_generator", "py/dropout_kinds",
         "py/raw_pointers_kept", "py/double_backward", "py/optimizers-foreach", "cpp/gpt", "cpp/script_residual", "cpp/slice_writes",
         "cpp/retained_graph", "cpp/random_own_generator")


def selected(options):
    modules = os.path.join(options.build, "zoo", "modules")
    if os.path.exists(options.cpp) and any(not o or o.startswith(("cpp", "*")) for o in options.only or [""]):
        subprocess.run([options.python, os.path.join(HERE, "cpp", "make_modules.py"), modules], check=True)
    programs = [*python_programs(options.python), *cpp_programs(options.cpp, modules)]
    if options.quick:
        programs = [p for p in programs if p.name in QUICK]
    if options.only:
        programs = [p for p in programs if any(fnmatch.fnmatch(p.name, pattern) for pattern in options.only)]
    return programs


def run_program(zoo, program, fractions):
    result, reason, seconds = zoo.baseline(program)
    if result is None:
        runs = [Run(program.name, "plain", "CONTROL", detail=reason, seconds=seconds)]
        say(runs[0])
        return runs
    if zoo.options.plain:
        runs = [Run(program.name, "plain", "exact", seconds=seconds, fixed=result["fixed_bytes"])]
        say(runs[0])
        return runs
    unlimited = zoo.unlimited(program, result)
    runs = [unlimited]
    say(unlimited)
    if unlimited.peak is not None:
        for fraction in fractions:
            runs.append(zoo.limited(program, result, unlimited, fraction))
            say(runs[-1])
    return runs


def main():
    options = parse_options()
    if not options.plain and not os.path.exists(options.memfit):
        sys.exit(f"run_zoo.py: no memfit at {options.memfit}. Build it first, or name it with --memfit.")
    programs = selected(options)
    if not programs:
        sys.exit("run_zoo.py: no program matches.")
    zoo = Zoo(options)
    if options.sweep is not None:
        chance = random.Random(options.seed)
        drawn = {}
        for _ in range(options.sweep):
            drawn.setdefault(chance.randrange(len(programs)), []).append(round(chance.uniform(0.25, 1.0), 3))
        work = [(programs[index], fractions) for index, fractions in sorted(drawn.items())]
    else:
        work = [(program, [float(f) for f in options.limits.split(",") if f]) for program in programs]
    runs = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for done in pool.map(lambda item: run_program(zoo, *item), work):
            runs += done
            if options.json:
                with open(options.json + ".part", "w") as file:
                    json.dump([dataclasses.asdict(run) for run in runs], file, indent=1)
                os.replace(options.json + ".part", options.json)
    if options.sweep is None:
        print_table(runs)
    failed = [run for run in runs if not run.passed]
    if failed:
        print("\nfailed:")
        for run in failed:
            say(run)
    print(f"{len(runs) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
