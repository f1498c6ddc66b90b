#!/usr/bin/env python3
"""Run one file of command-line cases: what is typed, what comes out, and the exit status.

    run_cases.py CASES_FILE --bin FOLDER_OF_MEMFIT --source REPOSITORY [--fake FOLDER]

A file holds cases one after the other:

    # A comment.
    $ memfit run --memory 512 -- true
    exit: 2
    stdout:
    anything
    stderr:
    memfit run: --memory: "512" has no unit{{.*}}
    ...

`$` begins a case; the line goes to sh in a new empty folder (all cases of a file share it). `exit:` is 0 where it is left
out, `stdout:` and `stderr:` are empty where they are left out. Lines must be equal; {{...}} holds a regular expression, and a
line `...` stands for any number of lines. `$SOURCE` is the repository, `$FAKE` the folder of the fake libtorch and programs.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile


def read_cases(path):
    cases, case, section = [], None, None
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\n")
            if line.startswith("$ "):
                case = {"line": number, "command": line[2:], "exit": 0, "stdout": [], "stderr": []}
                cases.append(case)
                section = None
            elif line.startswith("exit: ") and case and section is None:
                case["exit"] = int(line[6:])
            elif line in ("stdout:", "stderr:") and case:
                section = line[:-1]
            elif section and not line.startswith("#"):
                case[section].append(line)
            elif line and not line.startswith("#"):
                sys.exit(f"{path}:{number}: not a case: {line!r}")
    for case in cases:
        for name in ("stdout", "stderr"):  # blank lines before the next case are not part of it
            while case[name] and not case[name][-1]:
                case[name].pop()
    return cases


def pattern(lines):
    parts = []
    for line in lines:
        if line == "...":
            parts.append(r"(?:[^\n]*\n)*?")
            continue
        pieces = re.split(r"\{\{(.*?)\}\}", line)
        parts.append("".join(piece if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)) + "\n")
    return re.compile("".join(parts))


def text_of(data):
    text = data.decode("utf-8", "replace")
    return text if not text or text.endswith("\n") else text + "\n"


def run_case(case, folder, environment):
    result = subprocess.run(["sh", "-c", case["command"]], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                            capture_output=True, timeout=300)
    wrong = []
    if result.returncode != case["exit"]:
        wrong.append(f"exit status {result.returncode}, expected {case['exit']}")
    for name in ("stdout", "stderr"):
        got = text_of(getattr(result, name))
        if not pattern(case[name]).fullmatch(got):
            wrong.append(f"{name} is\n{got}expected\n" + "".join(line + "\n" for line in case[name]))
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases")
    parser.add_argument("--bin", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--fake", default="")
    arguments = parser.parse_args()
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("MEMFIT_") and name not in ("LD_PRELOAD", "RANK")}
    environment.update(PATH=arguments.bin + ":" + environment["PATH"], SOURCE=arguments.source, FAKE=arguments.fake,
                       LC_ALL="C.UTF-8", COLUMNS="120")
    cases = read_cases(arguments.cases)
    if not cases:
        sys.exit(f"{arguments.cases}: no case")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="memfit-cases-") as folder:
        for case in cases:
            wrong = run_case(case, folder, environment)
            if wrong:
                failed += 1
                print(f"{arguments.cases}:{case['line']}: $ {case['command']}\n" + "\n".join(wrong))
    print(f"{len(cases) - failed} of {len(cases)} cases as expected")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
