"""How near the planner comes to the proven optimum. Both schedules are judged by `memfit plan --check`.

  python tests/plan/optimum_test.py --memfit build/bin/memfit [--seconds 60] [--limits 0.9,0.6] [--only gpt1,cnn3] [--json out.json]
                                    [--record short|long | --traces 'real/*.mft']

Fails when, over the cases that the solver proves, the median of ours/optimum is above 1.05 or one is above 1.3, when a schedule is
not what its maker said, or when we refuse a limit that the solver meets.
"""
import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mft  # noqa: E402
import models  # noqa: E402
import oracle  # noqa: E402


def memfit(binary, *args):
    done = subprocess.run([binary, "plan", *args], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def check(binary, trace, schedule, folder, limit, seconds):
    """The one simulator must call the schedule possible, within the limit, and as dear as its maker says."""
    path = os.path.join(folder, "schedule.json")
    with open(path, "w") as f:
        json.dump(schedule, f)
    code, out, err = memfit(binary, trace, "--check", path, "--json")
    assert code == 0, err
    verdict = json.loads(out)
    assert verdict["possible"], verdict["fault"]
    assert verdict["peak_bytes"] <= limit * (1 + 1e-6), (verdict["peak_bytes"], limit)
    assert abs(verdict["recompute_seconds"] - seconds) <= 1e-6 + 1e-3 * seconds, (verdict["recompute_seconds"], seconds)


def ours(binary, trace, limit, folder):
    path = os.path.join(folder, "ours.json")
    code, out, err = memfit(binary, trace, "--tensor-memory", f"{limit}B", "--no-pack", "--points", "0", "--json", "--force", "--schedule", path)
    if code == 3:
        return None, None
    assert code == 0, err
    with open(path) as f:
        return json.loads(out)["plan"]["recompute_seconds"], json.load(f)


def run_case(args, name, step, trace, fraction, folder):
    limit = int(step.peak() * fraction)
    mine, schedule = ours(args.memfit, trace, limit, folder)
    solver = oracle.Oracle(step, limit)
    result = solver.solve(args.seconds, start=schedule, threads=args.threads)
    row = {"step": name, "ops": len(step.ops), "limit": fraction, "ours_ms": None if mine is None else mine * 1e3, "optimum_ms": result["objective"],
           "bound_ms": result["bound"], "proven": result["proven"], "infeasible": result["infeasible"], "solver_seconds": result["seconds"]}
    if schedule is not None:
        check(args.memfit, trace, schedule, folder, limit, mine)
    if result["objective"] is not None:
        best = solver.schedule()
        check(args.memfit, trace, best, folder, limit, sum(step.ops[i[3]].seconds for i in best["instructions"] if i[2] == "replay"))
    if row["infeasible"]:
        assert mine is None, "we claim a plan where there is none"
    if mine is not None and result["objective"] is not None and abs(result["objective"]) > 1e-6:  # ms; less is the solver's tolerance
        row["ratio"] = mine * 1e3 / result["objective"]
        row["ratio_to_bound"] = mine * 1e3 / result["bound"] if result["bound"] > 0 else None
    elif mine is not None and result["objective"] is not None:
        row["ratio"] = 1.0 if mine * 1e3 <= 1e-6 else float("inf")
    row["refused"] = mine is None and result["objective"] is not None
    return row


def record(args, folder):
    """Steps of tests/plan/small_models.py, recorded here and now."""
    program = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "small_models.py")]
    names = subprocess.run([*program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if name.startswith("long_") == (args.record == "long") and (not args.only or name in args.only.split(",")):
            path = os.path.join(folder, name + ".mft")
            subprocess.run([args.memfit, "record", "--quiet", "-o", path, "--", *program, name], check=True,
                           env=dict(os.environ, OMP_NUM_THREADS="1"))
    return os.path.join(folder, "*.mft")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memfit", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limits", default="0.9,0.8,0.7,0.6,0.5,0.4,0.3")
    parser.add_argument("--only", default="")
    parser.add_argument("--record", choices=("short", "long"), help="record the models of small_models.py, instead of the made steps")
    parser.add_argument("--traces", default="", help="recorded .mft files instead of the made steps")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        if args.record:
            args.traces = record(args, folder)
        if args.traces:
            for path in sorted(glob.glob(args.traces)):
                with open(path, "rb") as f:
                    cases[os.path.basename(path).removesuffix(".mft")] = (mft.decode(f.read())[0], path)
        else:
            for name, step in models.suite().items():
                path = os.path.join(folder, name + ".mft")
                with open(path, "wb") as f:
                    f.write(mft.encode([step], program=name))
                cases[name] = (step, path)
        for name, (step, path) in cases.items():
            if args.only and name not in args.only.split(","):
                continue
            for fraction in map(float, args.limits.split(",")):
                row = run_case(args, name, step, path, fraction, folder)
                rows.append(row)
                text = lambda x: "      -" if x is None else f"{x:9.3f}"  # noqa: E731
                print(f"{name:18} {row['ops']:4} ops  {fraction:.1f}  ours {text(row['ours_ms'])} ms  best {text(row['optimum_ms'])} ms"
                      f"  {'infeasible' if row['infeasible'] else 'proven' if row['proven'] else 'bound %.3f' % row['bound_ms']:14}"
                      f"  ratio {row.get('ratio', float('nan')):.3f}  {row['solver_seconds']:.1f} s{'  REFUSED' if row['refused'] else ''}", flush=True)
    proven = [r["ratio"] for r in rows if r["proven"] and "ratio" in r]
    known = [r["ratio"] for r in rows if "ratio" in r]
    refused = [r for r in rows if r["refused"]]
    median, worst = (statistics.median(proven), max(proven)) if proven else (float("nan"), float("nan"))
    print(f"{len(rows)} cases, {len(proven)} proven: median {median:.4f}, worst {worst:.4f}; against the solver's best in all {len(known)}: "
          f"worst {max(known, default=float('nan')):.4f}; no plan is possible in {sum(r['infeasible'] for r in rows)}; refused wrongly: {len(refused)}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    return 0 if proven and median <= 1.05 and worst <= 1.3 and not refused else 1


if __name__ == "__main__":
    sys.exit(main())
