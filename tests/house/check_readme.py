#!/usr/bin/env python3
"""Run the commands that README.md shows, so that none of them is wrong.

    check_readme.py REPOSITORY --bin FOLDER_OF_MEMFIT [--torch ON|OFF]

Commands stand in ```sh blocks. `memfit ...` and pipelines of it run in a new folder from which the repository's examples/ and
.venv can be seen. Scripts of the repository take minutes and run the tests themselves: they must exist, be executable and be
shell that parses. `cmake --preset NAME` must name a preset. Links to files must lead to files.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def commands(text):
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            line = re.sub(r"\s+#.*", "", line).strip()
            if line and not line.startswith("#"):
                yield line


def check_script(root, words):
    path = root / words[0]
    if not path.is_file() or not os.access(path, os.X_OK):
        return f"{words[0]} is not an executable file"
    return subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr


def check_preset(root, words):
    name = words[words.index("--preset") + 1]
    listed = subprocess.run(["cmake", "--list-presets=all"], cwd=root, capture_output=True, text=True).stdout
    return "" if f'"{name}"' in listed else f"there is no preset {name}"


def run_here(root, line, environment):
    with tempfile.TemporaryDirectory(prefix="memfit-readme-") as folder:
        for name in ("examples", ".venv"):
            if (root / name).exists():
                os.symlink(root / name, pathlib.Path(folder) / name)
        result = subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True,
                                stdin=subprocess.DEVNULL, timeout=900)
        return f"exit status {result.returncode}\n{result.stdout}{result.stderr}" if result.returncode else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--torch", default="ON")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    text = (root / "README.md").read_text(encoding="utf-8")
    environment = dict(os.environ, PATH=f"{arguments.bin}:{root}/.venv/bin:{os.environ['PATH']}")
    wrong, count = [], 0
    for line in commands(text):
        words = line.split()
        count += 1
        if words[0].startswith("scripts/"):
            problem = check_script(root, words)
        elif words[0] in ("cmake", "ctest") and "--preset" in words:
            problem = check_preset(root, words)
        elif words[0] in ("memfit", "build/bin/memfit"):
            if arguments.torch == "OFF" and " -- " in line:
                continue  # runs a PyTorch program
            problem = run_here(root, line.replace("build/bin/memfit", "memfit"), environment)
        else:
            problem = "this test does not know how to check such a command"
        if problem:
            wrong.append(f"README.md: $ {line}\n{problem}")
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        if not (root / link).exists():
            wrong.append(f"README.md: the link {link} leads nowhere")
    if count == 0:
        wrong.append("README.md: no command found")
    print("\n".join(wrong) or f"{count} commands checked")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
