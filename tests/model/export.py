#!/usr/bin/env python3
"""Export the models of zoo.py in every form, train each in Python eager, and leave files and results for parity.cpp.

    export.py FOLDER
"""
import copy
import json
import pathlib
import sys
import warnings

import numpy
import torch

import zoo

STEPS, RATE, MOMENTUM = 20, 0.05, 0.9


def batches(model, what, sizes):
    torch.manual_seed(7)
    made = []
    for size in sizes:
        inputs = zoo.rows(size, what)
        with torch.no_grad():
            target = torch.randn_like(copy.deepcopy(model).eval()(*inputs))
        made.append((inputs, target))
    return made


def train(model, data):
    """What parity.cpp does, op by op: mean square error, momentum."""
    model.train()
    torch.manual_seed(1)
    momenta = {}
    losses = []
    for step in range(STEPS):
        inputs, target = data[step % len(data)]
        loss = (model(*inputs) - target).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                momenta[name] = momenta[name] * MOMENTUM + parameter.grad if name in momenta else parameter.grad.clone()
                parameter.add_(momenta[name], alpha=-RATE)
                parameter.grad = None
    model.eval()
    with torch.no_grad():
        scores = model(*data[0][0])
    return torch.stack(losses), scores


def save_results(path, model, data):
    result = {f"input{b}_{i}": tensor for b, (inputs, _) in enumerate(data) for i, tensor in enumerate(inputs)}
    result.update({f"target{b}": target for b, (_, target) in enumerate(data)})
    losses, scores = train(model, data)
    result.update({"losses": losses, "scores": scores})
    result.update({f"state:{name}": tensor for name, tensor in model.state_dict().items()})
    numpy.savez(path, **{name: tensor.detach().contiguous().numpy() for name, tensor in result.items()})


def export_forms(model, sample, folder, name):
    """Each form with the file that evaluates, which may be the same."""
    batch = torch.export.Dim("batch", min=2, max=1024)
    dynamic = tuple({0: batch} for _ in sample)
    training, evaluating = copy.deepcopy(model).train(), copy.deepcopy(model).eval()
    forms = {}
    for form, shapes in (("static", None), ("dynamic", dynamic)):
        files = []
        for module, mode in ((training, "train"), (evaluating, "eval")):
            path = folder / f"{name}.{form}.{mode}.pt2"
            torch.export.save(torch.export.export(copy.deepcopy(module), sample, dynamic_shapes=shapes), path)
            files.append(path.name)
        forms[form] = files
    path = folder / f"{name}.scripted.pt"
    torch.jit.script(copy.deepcopy(training)).save(str(path))
    forms["scripted"] = [path.name, ""]
    if name in zoo.NOT_TRACEABLE:
        return forms
    files = []
    for module, mode in ((training, "train"), (evaluating, "eval")):
        path = folder / f"{name}.traced.{mode}.pt"
        traced = torch.jit.trace(copy.deepcopy(module), sample, check_trace=False)
        traced.load_state_dict(module.state_dict(), strict=False)  # tracing has run the model and moved its statistics
        traced.save(str(path))
        files.append(path.name)
    forms["traced"] = files
    return forms


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = []
    for name, (kind, what) in zoo.MODELS.items():
        torch.manual_seed(0)
        model = kind()
        sample = zoo.rows(6, what)
        forms = export_forms(model, sample, folder, name)
        for sizes, which in (([6, 6, 6], "even"), ([6, 5, 3], "uneven")):
            save_results(folder / f"{name}.{which}.npz", copy.deepcopy(model), batches(model, what, sizes))
        for form, (path, evaluating) in forms.items():
            fixed = form in ("static", "traced")
            cases.append({"name": f"{name}.{form}", "model": path, "eval": evaluating, "results": f"{name}.{'even' if fixed else 'uneven'}.npz",
                          "inputs": len(sample), "batches": 3})
    torch.export.save(torch.export.export(zoo.Branch(), zoo.rows(6, "features")), folder / "branch.pt2")
    torch.save(zoo.Mlp().state_dict(), folder / "state.pt")
    torch.jit.freeze(torch.jit.script(zoo.Mlp().eval())).save(str(folder / "frozen.pt"))
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
