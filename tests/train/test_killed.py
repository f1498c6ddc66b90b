#!/usr/bin/env python3
"""Kills a training run at random moments and lets it go on: test_killed.py TRAIN_PROGRAM --kills N [--seed S]

Every loss that was ever said for a step, and the weights in the end, must have the bits of the run that nobody killed."""
import argparse
import pathlib
import random
import signal
import subprocess
import tempfile
import time


def run_whole(program, folder):
    folder.mkdir()
    start = time.monotonic()
    subprocess.run([program, "run", folder, folder / "checkpoints"], check=True)
    return time.monotonic() - start


def losses_of(folder):
    out = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = line.split()
        out.setdefault(int(step), set()).add(loss)
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        whole, killed = pathlib.Path(name) / "whole", pathlib.Path(name) / "killed"
        seconds = run_whole(options.program, whole)
        wanted = losses_of(whole)
        assert sorted(wanted) == list(range(1, 51)) and all(len(v) == 1 for v in wanted.values())
        killed.mkdir()
        kills = during_write = 0
        while kills < options.kills:
            if (killed / "out.safetensors").exists():  # it came to its end: from the start again
                assert (killed / "out.safetensors").read_bytes() == (whole / "out.safetensors").read_bytes(), "other weights"
                for path in sorted(killed.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
            process = subprocess.Popen([options.program, "run", killed, killed / "checkpoints"], stderr=subprocess.PIPE, text=True)
            # Half of the kills aim at a checkpoint that is being written: its temporary folder is there.
            deadline = time.monotonic() + chance.uniform(0.3, 1.0) * seconds
            aim = kills % 2 == 1
            skip = chance.randrange(1, 8)
            while time.monotonic() < deadline and process.poll() is None:
                if aim and any((killed / "checkpoints").glob(".writing-*")):
                    skip -= 1
                    if skip <= 0:
                        break
                time.sleep(0.0005)
            if process.poll() is not None:
                assert process.returncode == 0, process.stderr.read()
                continue
            during_write += any((killed / "checkpoints").glob(".writing-*"))
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        subprocess.run([options.program, "run", killed, killed / "checkpoints"], check=True)
        for step, said in losses_of(killed).items():
            assert said == wanted[step], f"step {step}: {said} against {wanted[step]}"
        assert (killed / "out.safetensors").read_bytes() == (whole / "out.safetensors").read_bytes(), "other weights"
        assert during_write > 0, "no kill hit a checkpoint while it was written"
        print(f"{kills} kills, {during_write} of them while a checkpoint was written: the same losses and weights")


if __name__ == "__main__":
    main()
