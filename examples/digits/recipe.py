"""Handwritten digits (scikit-learn's copy of the UCI set: 1,797 images of 8 x 8), unevenly spread over the clients.

Every client holds its part of a fixed training split, skewed by label; all measure on the same held-out images.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ravnest_fed as rf

HELD_OUT = 0.2


class Digits(rf.Recipe):
    """A convolutional network of 21,546 parameters."""

    local_steps = 20

    def __init__(self) -> None:
        digits = load_digits()
        order = np.random.RandomState(0).permutation(len(digits.target))
        held_out = round(HELD_OUT * len(order))
        self.test, self.train = order[:held_out], order[held_out:]
        self.labels = digits.target
        self.images = torch.tensor(digits.images / 16, dtype=torch.float32)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def train_data(self, part: rf.Partition) -> tuple[torch.Tensor, torch.Tensor]:
        mine = self.train[part.dirichlet(self.labels[self.train], alpha=1.0)]
        return self.images[mine], torch.from_numpy(self.labels[mine])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        scores = model(self.images[self.test].to(device)).cpu()
        labels = torch.from_numpy(self.labels[self.test])
        right = (scores.argmax(1) == labels).double().mean()
        return {"accuracy": float(right), "loss": float(functional.cross_entropy(scores, labels))}

    def evaluation_examples(self) -> int:
        return len(self.test)
