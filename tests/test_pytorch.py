"""Loss, logits and gradients against those that PyTorch found, which golden/pytorch.txt keeps."""
import numpy as np
import pytest
from conftest import GOLDEN

import tinygpt as t


def witness():
    """{model: {name: array}} of the file, whose head says how it was made."""
    models = {}
    for part in (GOLDEN / "pytorch.txt").read_text(encoding="utf-8").split("\n=== ")[1:]:
        title, *lines = part.splitlines()
        arrays = models[title] = {}
        for line in lines:
            if line[0].isalpha():                   # a name, in two words for gradients; a shape
                words = line.split()
                name = " ".join(words[:1 + (words[0] == "d")])
                shape, numbers = [int(n) for n in words[len(name.split()):]], []
                arrays[name] = shape, numbers
            else:
                numbers += map(float, line.split())
        for name, (shape, numbers) in arrays.items():
            arrays[name] = np.array(numbers).reshape(shape)
    return models


def sines():
    """The parameters and sizes of the model of that name, by the rule of the file."""
    config = t.ModelConfig(vocab_size=11, context=5, max_context=7, width=6, heads=3, hidden=10,
                           layers=2)
    params, n = {}, 0
    for name, shape in t.param_shapes(config).items():
        numbers = n + 1 + np.arange(np.prod(shape)).reshape(shape)
        params[name] = 0.8 * np.sin(numbers * numbers) + name.endswith("_g")
        n = numbers.max()
    return params, config


@pytest.mark.parametrize("title", ["example", "sines"])
def test_loss_logits_and_every_gradient_are_those_of_pytorch(title):
    want, example = witness()[title], t.example(46)
    params, config = (example.params, example.config) if title == "example" else sines()
    x, y = (want.pop(name).astype(int) for name in "xy")
    if title == "example":
        assert (x == example.x).all() and (y == example.y).all()
    got = {"logits": t.forward(params, x, config)[0]}
    got["loss"], grads = t.loss_and_grads(params, x, y, config)
    got |= {f"d {name}": gradient for name, gradient in grads.items()}
    assert got.keys() == want.keys()
    for name, W in want.items():
        assert np.shape(got[name]) == W.shape, name
        largest = max(np.abs(W).max(), 1e-6)        # where all is rounding, an array is 0
        assert np.abs(got[name] - W).max() <= 1e-9 * largest, name
