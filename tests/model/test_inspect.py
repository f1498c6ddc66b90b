#!/usr/bin/env python3
"""`memfit inspect` on what export.py left: the facts of each form, and refusals by name.

    test_inspect.py MEMFIT FOLDER
"""
import json
import pathlib
import subprocess
import sys


def inspect(*words):
    done = subprocess.run([sys.argv[1], "inspect", *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def facts(*words):
    status, out, err = inspect(*words, "--json")
    assert status == 0, (words, err)
    return json.loads(out)


def refused(status, text, *words):
    got, out, err = inspect(*words)
    assert got == status and text in err and not out, (words, got, out, err)


def main():
    folder = pathlib.Path(sys.argv[2])
    gpt = facts(folder / "gpt.dynamic.train.pt2")
    # tokens 50x16 shared with the head, places 12x16, two blocks, one norm
    count = 50 * 16 + 12 * 16 + 2 * (2 * 32 + 48 * 17 + 16 * 17 + 64 * 17 + 16 * 65) + 32
    assert gpt["parameters"] == count and gpt["parameter_bytes"] == 4 * count, gpt
    assert gpt["format"] == "torch.export" and gpt["trainable"] is True and gpt["why_not"] is None, gpt
    assert gpt["buffers"] == 12 and gpt["buffer_bytes"] == 96, gpt
    (tokens,) = gpt["inputs"]
    assert tokens["name"] == "tokens" and tokens["dtype"] == "int64" and isinstance(tokens["shape"][0], str) and tokens["shape"][1] == 9, tokens
    assert facts(folder / "gpt.static.train.pt2")["inputs"][0]["shape"] == [6, 9]
    assert facts(folder / "gpt.scripted.pt")["parameters"] == count, "tied weights count once"
    assert gpt["training_bytes_without_activations"]["adamw"] == 16 * count + 96, gpt

    cnn = facts(folder / "cnn.static.eval.pt2")
    assert cnn["trainable"] is False and "exported in eval mode" in cnn["why_not"] and "model.train()" in cnn["why_not"], cnn
    assert facts(folder / "cnn.traced.eval.pt")["trainable"] is False
    assert facts(folder / "cnn.scripted.pt")["evaluates_as"] == "eval"
    pair = facts(folder / "cnn.static.train.pt2", "--eval-model", folder / "cnn.static.eval.pt2")
    assert (pair["trains_as"], pair["evaluates_as"]) == ("train", "eval"), pair
    frozen = facts(folder / "frozen.pt")
    assert frozen["trainable"] is False and "frozen" in frozen["why_not"], frozen
    assert "cannot be trained" in inspect(folder / "frozen.pt")[1]
    assert "adamw" in inspect(folder / "mlp.dynamic.train.pt2")[1]

    refused(4, "torch.ops.higher_order.cond): control flow that depends on data", folder / "branch.pt2")
    refused(4, "weights or other Python objects", folder / "state.pt")
    refused(4, "not a model", folder / "cases.json")
    refused(4, "cannot be opened", folder / "none.pt2")
    refused(4, "which is not among its weights", folder / "mlp.static.train.pt2", "--eval-model", folder / "cnn.static.eval.pt2")
    refused(4, "exported in training mode", folder / "cnn.static.train.pt2", "--eval-model", folder / "cnn.static.train.pt2")
    refused(2, "--help")
    whole = (folder / "mlp.static.train.pt2").read_bytes()
    cut = folder / "cut.pt2"
    cut.write_bytes(whole[:len(whole) // 2])
    refused(4, "cut.pt2", cut)
    print("inspect says what each file is")


if __name__ == "__main__":
    main()
