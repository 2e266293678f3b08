import numpy as np


class Images:
    shape, number = (3, 32, 32), 256

    def __init__(self, root, train=True, transform=None, **_):
        rng = np.random.default_rng(int(train))
        pictures = np.random.default_rng(7).normal(size=(10, *self.shape))
        self.labels = rng.integers(10, size=self.number)
        noise = rng.normal(size=(self.number, *self.shape))
        self.images = (pictures[self.labels] + noise).astype(np.float32)

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class CIFAR10(Images):
    pass


class MNIST(Images):
    shape = (1, 28, 28)


class FashionMNIST(MNIST):
    pass
