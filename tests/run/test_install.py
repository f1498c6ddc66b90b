#!/usr/bin/env python3
"""Install memfit somewhere and use it from there: find_package in a project of one's own, and `memfit run`.

    test_install.py BUILD_FOLDER TORCH_DIR PYTHON_WITH_TORCH
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

CONSUMER = pathlib.Path(__file__).resolve().parent / "consumer"


def run(*command, **options):
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def main():
    build, torch_dir, python = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="memfit-install-") as name:
        folder = pathlib.Path(name)
        prefix = folder / "prefix"
        run("cmake", "--install", build, "--prefix", prefix)
        run("cmake", "-S", CONSUMER, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTorch_DIR={torch_dir}",
            "-DCMAKE_BUILD_TYPE=Release")
        run("cmake", "--build", folder / "build")
        run(folder / "build/consumer")
        report = folder / "run.json"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MEMFIT_")}
        run(prefix / "bin/memfit", "run", "--report", report, "--", python, "-c", "import torch; torch.ones(8).add(1)",
            env=environment)
        said = json.loads(report.read_text())
        assert said["attached"] and said["ops"] > 0, said


if __name__ == "__main__":
    main()
