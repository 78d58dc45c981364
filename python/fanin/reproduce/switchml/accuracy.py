"""§4.6, Appendix E, Figures 2 and 11: training with sums of scaled integers, of digits.

It shows what the paper's representation does to training, by numpy alone: fanin's own quantiser is
held to the same bound by its tests, and its training of digits and of a small GPT by theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin.reproduce import ReproduceError
from fanin.reproduce.finding import Experiment, Finding, Outcome, Range, at_most
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 8
BLOCK = 256
"""Elements of a packet, which share one factor."""
HIDDEN = 64
EPOCHS, EPOCHS_QUICK = 30, 10
BATCH = 8
RATE = 0.2
TRAINED = 1437
"""Of 1797 digits; the rest is for the accuracy."""
REACHED = 0.9
WAYS = {
    "float32": "sums of float32",
    "scaled": "sums of integers, scaled by block (§4.6)",
    "coarse": "sums of integers, all scaled by 4",
}


def run(lab: Lab) -> Outcome:
    """Train from the same beginnings with each way to sum."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        text = "accuracy needs digits: pip install scikit-learn, or leave it out with --only"
        raise ReproduceError(text) from None
    images, labels = load_digits(return_X_y=True)
    epochs = EPOCHS_QUICK if lab.quick else EPOCHS
    curves = {
        way: [_train(images / 16.0, labels, way, seed, epochs) for seed in lab.seeds]
        for way in WAYS
    }

    def differs(way: str) -> Spread:
        pairs = zip(curves[way], curves["float32"], strict=True)
        return Spread.of([100 * (one[-1] - other[-1]) for one, other in pairs])

    def epoch(curve: list[float]) -> int:
        return next((at + 1 for at, value in enumerate(curve) if value >= REACHED), epochs + 1)

    def later() -> Spread:
        pairs = zip(curves["scaled"], curves["float32"], strict=True)
        return Spread.of([epoch(one) - epoch(other) for one, other in pairs])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at, (way, name) in enumerate(WAYS.items()):
            for curve in curves[way]:
                label = name if curve is curves[way][0] else None
                axes.plot(range(1, epochs + 1), curve, f"C{at}", alpha=0.6, label=label)
        finish(axes, "epochs", "accuracy on digits that were held back")

    scaled, coarse = differs("scaled"), differs("coarse")
    return Outcome(
        [
            Finding(
                "§4.6, Fig. 11",
                "digits: accuracy with integers scaled by block, less that with float32",
                "similar: within 1 %",
                scaled,
                holds=Range(-1, 1),
                unit="%",
            ),
            Finding(
                "§4.6, Fig. 11",
                f"digits: epochs until {100 * REACHED:g} % are right, more than with float32",
                "a similar number: at most one more",
                later(),
                holds=at_most(1),
            ),
            Finding(
                "App. E",
                "digits: accuracy where all are scaled by 4, less that with float32",
                "worse: a small factor costs precision",
                coarse,
                holds=at_most(-1),
                unit="%",
            ),
        ],
        draw,
        {"accuracy": curves},
    )


def _train(images: Any, labels: Any, way: str, seed: int, epochs: int) -> list[float]:
    """Return the accuracy after each epoch of a network with one hidden layer."""
    import numpy as np

    generator = np.random.default_rng(seed)
    order = generator.permutation(len(images))
    train, test = order[:TRAINED], order[TRAINED:]
    sizes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
    weights = [generator.normal(0, 0.2, size).astype(np.float32) for size in sizes]
    accuracy = []
    for _ in range(epochs):
        shuffled = generator.permutation(train)
        step = WORKERS * BATCH
        for at in range(0, len(shuffled) - step + 1, step):
            gradients = [
                _gradient(weights, images[part], labels[part])
                for part in np.split(shuffled[at : at + step], WORKERS)
            ]
            mean = _summed(np.stack(gradients), way) / WORKERS
            ends = np.cumsum([weight.size for weight in weights])[:-1]
            for weight, part in zip(weights, np.split(mean, ends), strict=True):
                weight -= RATE * part.reshape(weight.shape)
        right = _scores(weights, images[test])[1].argmax(axis=1) == labels[test]
        accuracy.append(float(right.mean()))
    return accuracy


def _scores(weights: list[Any], images: Any) -> tuple[Any, Any]:
    import numpy as np

    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    return hidden, hidden @ weights[2] + weights[3]


def _gradient(weights: list[Any], images: Any, labels: Any) -> Any:
    import numpy as np

    hidden, scores = _scores(weights, images)
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[range(len(labels)), labels] -= 1
    chances /= len(labels)
    back = (chances @ weights[2].T) * (hidden > 0)
    parts = [images.T @ back, back.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def _summed(gradients: Any, way: str) -> Any:
    """Return the sum of the rows as this way has it."""
    import numpy as np

    if way == "float32":
        return gradients.sum(axis=0)
    if way == "coarse":
        return np.rint(gradients * 4.0).astype(np.int64).sum(axis=0) / 4.0
    workers, elements = gradients.shape
    padded = np.pad(gradients, ((0, 0), (0, -elements % BLOCK))).reshape(workers, -1, BLOCK)
    # f = (2^31 - 1) / (n 2^m), 2^m the largest of a block, of all workers, rounded up (§4.6).
    largest = np.abs(padded).max(axis=(0, 2))
    powers = np.exp2(np.ceil(np.log2(np.maximum(largest, 2.0**-100))))
    factors = (2**31 - 1) / (workers * powers)
    integers = np.rint(padded.astype(np.float64) * factors[None, :, None]).astype(np.int64)
    return (integers.sum(axis=0) / factors[:, None]).reshape(-1)[:elements]


EXPERIMENT = Experiment("accuracy", "Training digits with sums of integers (Figure 11)", run)
