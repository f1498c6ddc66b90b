#!/usr/bin/env python3
"""Recording a step, planning it, and running by plan: `memfit record`, `memfit plan` and `memfit run` on a real program.

    test_plans.py FOLDER_OF_MEMFIT PYTHON_WITH_TORCH [unittest arguments]
"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN, PYTHON = (sys.argv.pop(1) for _ in range(2))
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith("MEMFIT_") and name not in ("LD_PRELOAD", "RANK")}
ENVIRONMENT["OMP_NUM_THREADS"] = "2"  # the same sums in every run

PROGRAM = """
import hashlib, sys, torch
from torch import nn
from torch.nn import functional as F
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
sizes, steps, adam = [int(x) for x in sys.argv[1].split(",")], int(sys.argv[2]), len(sys.argv) > 3
torch.manual_seed(0)
net = nn.Sequential(*[Block(128) for _ in range(6)], nn.Linear(128, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3) if adam else torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(steps):
    rows = sizes[step % len(sizes)] if step > 3 else sizes[0]
    x, y = torch.randn(rows, 128), torch.randint(10, (rows,))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    print("loss", loss.item().hex(), flush=True)
digest = hashlib.sha256()
for p in net.parameters(): digest.update(p.detach().clone().numpy().tobytes())
print("weights", digest.hexdigest())
"""


class Plans(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="memfit-plans-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        (self.path / "program.py").write_text(PROGRAM)

    def memfit(self, *words, expect=0, **variables):
        result = subprocess.run([f"{BIN}/memfit", *map(str, words)], env=dict(ENVIRONMENT, **variables), cwd=self.path, capture_output=True,
                                text=True, timeout=300)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result

    def program(self, *arguments):
        return ["--", PYTHON, "program.py", *map(str, arguments)]

    def run_program(self, *arguments, flags=(), **options):
        """What it printed, and its report."""
        result = self.memfit("run", "--force", "--report", "run.json", *flags, *self.program(*arguments), **options)
        return result.stdout, json.loads((self.path / "run.json").read_text())

    def plan(self, *words):
        return json.loads(self.memfit("plan", *words, "--json").stdout)

    def test_a_recorded_step_has_the_peak_of_the_run(self):
        self.memfit("record", "-o", "step.mft", *self.program(1024, 6))
        _, report = self.run_program(1024, 6)
        recorded = self.plan("step.mft")
        self.assertLess(abs(recorded["recorded_peak_bytes"] / report["unlimited_peak_bytes"] - 1), 0.01)
        self.assertGreater(recorded["recorded_step_seconds"], 0)
        self.assertEqual(len(recorded["curve"]) >= 8, True)

    def test_recording_changes_no_bit_and_replaces_no_file(self):
        plain = subprocess.run([PYTHON, "program.py", "512", "4"], env=ENVIRONMENT, cwd=self.path, capture_output=True, text=True, check=True).stdout
        self.assertEqual(self.memfit("record", "-o", "step.mft", *self.program(512, 4)).stdout, plain)
        again = self.memfit("record", "-o", "step.mft", *self.program(512, 4), expect=2)
        self.assertIn("step.mft", again.stderr)

    def test_a_run_by_plan_is_exact_held_and_as_predicted(self):
        plain, report = self.run_program(1024, 16)
        limit = int(0.6 * report["unlimited_peak_bytes"])
        planned, report = self.run_program(1024, 16, flags=("--tensor-memory", f"{limit}B"))
        self.assertEqual(planned, plain)
        self.assertLessEqual(report["peak_bytes"], limit)
        self.assertGreaterEqual(report["planned_steps"], 10)
        self.assertLessEqual(report["predicted_peak_bytes"], limit)
        self.assertGreater(report["predicted_peak_bytes"], 0.9 * limit)
        self.assertGreater(report["step_seconds"], 0)
        online, report = self.run_program(1024, 16, flags=("--tensor-memory", f"{limit}B", "--no-plan"))
        self.assertEqual(online, plain)
        self.assertEqual(report["planned_steps"], 0)

    def test_other_batch_sizes_are_predicted_to_the_byte(self):
        self.memfit("record", "-o", "two.mft", *self.program("256,512", 12))
        [predicted] = self.plan("two.mft", "--batch", "2048..2048")["batches"]
        self.memfit("record", "-o", "large.mft", *self.program(2048, 6))
        measured = self.plan("large.mft")["recorded_peak_bytes"]
        self.assertLess(abs(predicted["predicted_peak_bytes"] / measured - 1), 0.03)

    def test_offloading_fits_what_nothing_else_does(self):
        plain, report = self.run_program(64, 12, "adam")
        state = 4 * 4 * 6 * (128 * 512 * 2)   # weights, gradients and two moments of the blocks' matrices
        limit = int(0.75 * state)
        self.run_program(64, 12, "adam", flags=("--tensor-memory", f"{limit}B"), expect=3)
        outside = self.path / "outside"
        outside.mkdir()
        offloaded, report = self.run_program(64, 12, "adam", flags=("--tensor-memory", f"{limit}B", "--offload", outside))
        self.assertEqual(offloaded, plain)
        self.assertLessEqual(report["peak_bytes"], limit)
        self.assertGreater(report["offload_write_bytes"], 0)
        self.assertGreater(report["offload_read_bytes"], 0)
        self.assertEqual(list(outside.iterdir()), [])

    def test_a_killed_run_leaves_no_file_outside(self):
        outside = self.path / "outside"
        outside.mkdir()
        command = [f"{BIN}/memfit", "run", "--tensor-memory", "5MiB", "--offload", str(outside), *self.program(64, 100000, "adam")]
        process = subprocess.Popen(command, env=ENVIRONMENT, cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        for _ in range(4):
            process.stdout.readline()   # it is in mid-run
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        self.assertEqual(list(outside.iterdir()), [])

    def test_a_folder_that_cannot_serve_is_named_before_the_program_starts(self):
        for folder, word in (("missing", "missing"), ("program.py", "no folder"), ("/dev/shm", "memory")):
            result = self.memfit("run", "--offload", folder, *self.program(64, 1), expect=2)
            self.assertIn(word, result.stderr)
            self.assertEqual(result.stdout, "")
        result = self.memfit("run", "--offload-limit", "1GiB", *self.program(64, 1), expect=2)
        self.assertIn("--offload", result.stderr)

    def test_too_little_room_outside_is_no_crash(self):
        outside = self.path / "outside"
        outside.mkdir()
        result = self.memfit("run", "--tensor-memory", "5MiB", "--offload", outside, "--offload-limit", "1MiB", *self.program(64, 3, "adam"), expect=3)
        self.assertIn("does not fit", result.stderr)


if __name__ == "__main__":
    unittest.main()
