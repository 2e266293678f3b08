import numpy as np


class DataLoader:
    def __init__(self, dataset, batch_size=1, shuffle=False, drop_last=False, **_):
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.drop_last = drop_last
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        import torch

        number = len(self.dataset)
        order = self.rng.permutation(number) if self.shuffle else np.arange(number)
        for begin in range(0, number, self.batch_size):
            rows = order[begin : begin + self.batch_size]
            if len(rows) == self.batch_size or not self.drop_last:
                columns = zip(*(self.dataset[i] for i in rows), strict=True)
                yield [torch.tensor(np.stack(column)) for column in columns]

    def __len__(self):
        return len(self.dataset) // self.batch_size
