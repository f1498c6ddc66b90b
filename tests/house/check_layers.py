#!/usr/bin/env python3
"""Check every #include of memfit/ against layers.txt.

    check_layers.py REPOSITORY      complains about each include that goes against an arrow; exit status 1 if there is one
    check_layers.py --self-test     checks this checker on files that it makes
"""
import pathlib
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|aten)/")
SOURCES = {".h", ".hpp", ".cpp", ".cc", ".c", ".inc"}


def read_layers(path):
    layers, offline = {}, set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        folder, colon, rest = line.partition(":")
        if not colon or folder in layers:
            sys.exit(f"{path}:{number}: not a new line of the form 'folder: other folders'")
        words = rest.split()
        if "offline" in words:
            offline.add(folder)
        layers[folder] = {word for word in words if word != "offline"}
    for folder, allowed in layers.items():
        unknown = allowed - layers.keys()
        if unknown:
            sys.exit(f"{path}: {folder} names {', '.join(sorted(unknown))}, which is no folder here")
    return layers, offline


def complaints(root):
    layers, offline = read_layers(root / "layers.txt")
    found = []
    for path in sorted((root / "memfit").rglob("*")):
        if path.suffix not in SOURCES or not path.is_file():
            continue
        where = path.relative_to(root)
        if len(where.parts) < 3:
            found.append(f"{where}: no file stands in memfit/ itself")
            continue
        folder = where.parts[1]
        if folder not in layers:
            found.append(f"{where}: layers.txt does not know the folder {folder}")
            continue
        is_test = path.stem.endswith(("_test", "_bench", "_fuzz"))
        for match in INCLUDE.finditer(path.read_text(errors="replace")):
            name = match.group(2)
            if TORCH.match(name) and folder in offline:
                found.append(f"{where}: {folder} includes <{name}>, and layers.txt says it is offline")
            if not name.startswith("memfit/"):
                continue
            parts = name.split("/")
            target = parts[1]
            if target not in {folder, "core"} | layers[folder] and not (is_test and target == "testing"):
                found.append(f"{where}: {folder} includes {name}, and layers.txt has no arrow {folder} -> {target}")
            if "detail" in parts and target != folder:
                found.append(f"{where}: includes {name}, which is private to {target}")
            if not (root / name).exists():
                found.append(f"{where}: includes {name}, which does not exist")
    for folder in layers:  # arrows go one way: no folder reaches itself
        seen, todo = set(), list(layers[folder])
        while todo:
            step = todo.pop()
            if step == folder:
                found.append(f"layers.txt: {folder} can be reached from itself")
                break
            if step not in seen:
                seen.add(step)
                todo.extend(layers[step])
    return found


def self_test():
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        (root / "layers.txt").write_text("core: offline\nlow: offline\nhigh: low\n")
        for folder in ("core", "low/detail", "high"):
            (root / "memfit" / folder).mkdir(parents=True)
        (root / "memfit/core/a.h").write_text("")
        (root / "memfit/low/a.h").write_text('#include "memfit/core/a.h"\n')
        (root / "memfit/high/a.h").write_text('#include "memfit/low/a.h"\n#include <torch/torch.h>\n')
        assert complaints(root) == [], complaints(root)
        for path, text, word in [("memfit/low/b.h", '#include "memfit/high/a.h"', "no arrow low -> high"),
                                 ("memfit/low/b.h", "#  include <c10/core/Device.h>", "offline"),
                                 ("memfit/high/b.h", '#include "memfit/low/none.h"', "does not exist"),
                                 ("memfit/high/b.h", '#include "memfit/low/detail/x.h"', "private to low"),
                                 ("memfit/b.h", "", "memfit/ itself"),
                                 ("memfit/new/b.h", "", "does not know the folder new")]:
            bad = root / path
            bad.parent.mkdir(exist_ok=True)
            bad.write_text(text + "\n")
            assert any(word in line for line in complaints(root)), (word, complaints(root))
            bad.unlink()
        (root / "layers.txt").write_text("core: offline\nlow: high\nhigh: low\n")
        assert any("reached from itself" in line for line in complaints(root))
    print("the layer check finds each kind of wrong include")


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        sys.exit(0)
    lines = complaints(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(lines) or "every include follows layers.txt")
    sys.exit(1 if lines else 0)
