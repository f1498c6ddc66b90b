#!/usr/bin/env python3
"""Real PyTorch programs under the real `memfit run`.

    test_programs.py FOLDER_OF_MEMFIT PYTHON_WITH_TORCH CPP_TRAINER [unittest arguments]
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN, PYTHON, TRAINER = (sys.argv.pop(1) for _ in range(3))
MIB = 1 << 20
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith("MEMFIT_") and name not in ("LD_PRELOAD", "RANK")}
ENVIRONMENT["OMP_NUM_THREADS"] = "2"  # the same sums in every run

TRAIN = """
import hashlib, torch
from torch import nn
def make(width=256, layers=10):
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)])
def train(model, x, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print("loss", loss.item().hex(), flush=True)
def weights(model):
    digest = hashlib.sha256()
    for p in model.parameters(): digest.update(p.detach().numpy().tobytes())
    print("weights", digest.hexdigest(), flush=True)
"""
PLAIN = TRAIN + """
model = make(); train(model, torch.randn(2048, 256)); weights(model)
"""


class Program(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="memfit-run-")
        self.path = pathlib.Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def memfit(self, *flags, program, expect=0, **variables):
        command = [f"{BIN}/memfit", "run", "--force", "--report", str(self.path / "run.json"), *flags, "--", *program]
        result = subprocess.run(command, env=dict(ENVIRONMENT, **variables), cwd=self.path, capture_output=True, text=True, timeout=600)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result

    def python(self, text, *flags, **options):
        script = self.path / "program.py"
        script.write_text(text)
        return self.memfit(*flags, program=[PYTHON, str(script)], **options)

    def report(self, name="run.json"):
        return json.loads((self.path / name).read_text())

    def check_same_under_limit(self, run):
        """`run(*flags)` gives the program's output; under 0.6 of its peak it must be the same, and the limit held."""
        free = run()
        peak = self.report()["peak_bytes"]
        limit = int(peak * 0.6)
        held = run("--tensor-memory", f"{limit}B")
        self.assertEqual(free, held)
        report = self.report()
        self.assertLessEqual(report["peak_bytes"], limit)
        self.assertGreater(report["evictions"], 0)
        self.assertEqual(report["limit_bytes"], limit)
        self.assertTrue(report["finished"])
        return report

    def test_python_gives_the_same_bits_under_a_limit(self):
        plain = subprocess.run([PYTHON, "-c", PLAIN], env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
        report = self.check_same_under_limit(lambda *flags: self.python(PLAIN, *flags).stdout)
        self.assertEqual(self.python(PLAIN).stdout, plain)
        self.assertRegex(report["torch_version"], r"^\d+\.\d+\.\d+")

    def test_cpp_gives_the_same_bits_under_a_limit(self):
        plain = subprocess.run([TRAINER], env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
        self.check_same_under_limit(lambda *flags: self.memfit(*flags, program=[TRAINER]).stdout)
        self.assertEqual(self.memfit(program=[TRAINER]).stdout, plain)

    def test_threads_of_the_program_are_covered(self):
        text = TRAIN + """
import threading
model = make(); x = torch.randn(2048, 256)
thread = threading.Thread(target=train, args=(model, x)); thread.start(); thread.join()
weights(model)
"""
        self.check_same_under_limit(lambda *flags: self.python(text, *flags).stdout)

    def loader(self, method):
        text = TRAIN + f"""
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.full((1024, 256), float(i + 1)) / 7
if __name__ == "__main__":
    model = make()
    for batch in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="{method}"):
        train(model, batch.flatten(0, 1), steps=1)
    weights(model)
"""
        self.check_same_under_limit(lambda *flags: self.python(text, *flags).stdout)
        self.assertEqual([path.name for path in self.path.glob("run*.json")], ["run.json"])

    def test_forked_loader_workers_are_left_alone(self):
        self.loader("fork")

    def test_spawned_loader_workers_are_left_alone(self):
        self.loader("spawn")

    def test_programs_that_the_program_starts_are_left_alone(self):
        text = """
import os, subprocess, sys, torch
for environment in (None, {k: v for k, v in os.environ.items() if k != "MEMFIT_ATTACHED"}):
    subprocess.run([sys.executable, "-c", "import torch; print(torch.ones(1 << 22).sum().item())"], env=environment, check=True)
"""
        self.assertEqual(self.python(text, "--tensor-memory", "1MiB").stdout, "4194304.0\n4194304.0\n")
        self.assertEqual([path.name for path in self.path.glob("run*.json")], ["run.json"])

    def test_ranks_of_torchrun_get_the_limit_each_and_report_each(self):
        (self.path / "rank.py").write_text(TRAIN + """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(make())
torch.manual_seed(dist.get_rank())
x = torch.randn(2048, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
dist.destroy_process_group()
if int(__import__("os").environ["RANK"]) == 0: weights(model)
""")
        program = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rank.py"]
        free = self.memfit(program=program, OMP_NUM_THREADS="1").stdout
        self.assertIn("weights", free)
        peaks = [self.report(f"run.rank{rank}.json")["peak_bytes"] for rank in (0, 1)]
        limit = int(max(peaks) * 0.7)
        self.assertEqual(self.memfit("--tensor-memory", f"{limit}B", program=program, OMP_NUM_THREADS="1").stdout, free)
        for rank in (0, 1):
            report = self.report(f"run.rank{rank}.json")
            self.assertEqual(report["rank"], rank)
            self.assertLessEqual(report["peak_bytes"], limit)
            self.assertGreater(report["evictions"], 0)
        self.assertIsNone(self.report()["rank"])

    def test_what_does_not_fit_and_is_not_handled_ends_with_3(self):
        text = "import torch\ntorch.ones(16 << 20)\nprint('done')\n"
        result = self.python(text, "--tensor-memory", "32MiB", expect=3)
        self.assertIn("OutOfMemoryError", result.stderr)
        self.assertIn("smallest limit that gets past this point", result.stderr)
        report = self.report()
        self.assertGreater(report["refusals"], 0)
        self.assertGreater(report["least_limit_bytes"], 32 * MIB)
        self.assertLessEqual(report["peak_bytes"], 32 * MIB)
        self.assertEqual(report["exit_status"], 1)

    def test_what_does_not_fit_and_is_handled_is_the_programs_own_affair(self):
        text = """
import sys, torch
try: torch.zeros(64 << 20)
except torch.OutOfMemoryError: sys.exit(9)
"""
        text = text.replace("sys.exit(9)", "print('handled')") + "for i in range(200): torch.ones(8).add(1)\nsys.exit(9)\n"
        self.assertEqual(self.python(text, "--tensor-memory", "32MiB", expect=9).stdout, "handled\n")

    def test_an_uncaught_refusal_in_cpp_ends_with_3(self):
        self.memfit("--tensor-memory", "32MiB", program=[TRAINER, "uncaught"], expect=3)
        self.assertEqual(self.report()["signal"], 6)

    def test_a_killed_program_has_a_report_up_to_its_end(self):
        result = self.python(PLAIN + "import os; os.kill(os.getpid(), 9)\n", expect=-9)
        self.assertIn("weights", result.stdout)
        report = self.report()
        self.assertGreater(report["peak_bytes"], 10 * MIB)
        self.assertGreater(report["ops"], 100)
        self.assertFalse(report["finished"])

    def test_python_without_torch_is_said_to_use_none(self):
        result = self.python("print('hello')\n")
        self.assertIn("used no libtorch", result.stderr)
        self.assertFalse(self.report()["attached"])

    def test_libtorch_of_another_folder_is_the_only_one_in_the_process(self):
        """As in another virtual environment: the package seen through a link with another name."""
        found = subprocess.run([PYTHON, "-c", "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"],
                               capture_output=True, text=True, check=True).stdout.strip()
        site = self.path / "other site"
        site.mkdir()
        copy = site / "torch"
        copy.mkdir()
        # A copy of the libraries (hard links where possible), so that they are other files at another place.
        subprocess.run(["cp", "-r", "--no-target-directory", found, str(copy)], check=True)
        text = PLAIN + """
libraries = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "libtorch_cpu.so" in line}
print("libraries", libraries)
"""
        result = self.python(text, "--tensor-memory", "40MiB", PYTHONPATH=str(site))
        self.assertIn(f"libraries {{'{copy}/lib/libtorch_cpu.so'}}", result.stdout)
        self.assertTrue(self.report()["attached"])

    def test_the_library_without_memfit_run_limits_and_reports(self):
        environment = dict(ENVIRONMENT, LD_PRELOAD=str(pathlib.Path(BIN).parent / "lib/libmemfit_preload.so"),
                           MEMFIT_TENSOR_MEMORY="40MiB", MEMFIT_REPORT=str(self.path / "own.json"))
        result = subprocess.run([PYTHON, "-c", PLAIN], env=environment, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        report = self.report("own.json")
        self.assertGreater(report["evictions"], 0)
        self.assertLessEqual(report["peak_bytes"], 40 * MIB)
        self.assertEqual(report["limit_bytes"], 40 * MIB)
        self.assertRegex(result.stderr, r"memfit: tensor memory limit 40\.0 MiB, peak .*own\.json")

    def test_verify_compares_and_finds_nothing_wrong(self):
        self.python(PLAIN, "--tensor-memory", "40MiB", "--verify")
        report = self.report()
        self.assertGreater(report["verified_values"], 0)
        self.assertEqual(report["verify_failures"], 0)

    def test_both_doors_can_be_chosen(self):
        for door in ("fake", "generic_mode"):
            with self.subTest(door=door):
                self.python(PLAIN, "--tensor-memory", "40MiB", MEMFIT_DOOR=door)
                self.assertEqual(self.report()["door"], door)


if __name__ == "__main__":
    unittest.main(verbosity=2)
