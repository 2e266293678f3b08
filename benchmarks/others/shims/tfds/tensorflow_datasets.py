"""TensorFlow Datasets, whose `load`, `builder` and `data_source` give small made-up data.

Training code of other people gets it by being run with this folder before others on its path. A
data set has the features of the one that it stands for, with random contents of which something can
be learned: an image is its class's picture and noise, a text is a walk over words.
"""

import importlib
import os
import random
import sys
from types import SimpleNamespace

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
NUMBER = int(os.environ.get("OTHERS_EXAMPLES", "256"))
TEXT = "the a cat dog bird house tree sees likes finds old young green red quickly slowly"
WORDS = TEXT.split()
PARTS = ("train", "validation", "test")
IMAGES = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "imagenet2012": ((64, 64, 3), 1000),
    "imagenette": ((64, 64, 3), 10),
}


def the_package():
    """Returns the package itself, which this module hides."""
    path, sys.path[:] = [*sys.path], [x for x in sys.path if os.path.abspath(x) != HERE]
    del sys.modules[__name__]
    try:
        return importlib.import_module(__name__)
    finally:
        sys.path[:] = path


# ---- contents ------------------------------------------------------------------------------------


def images(shape, classes, rng, number, binary=False):
    """Returns images, each the picture of its class with noise, and their classes."""
    labels = rng.integers(classes, size=number)
    pictures = np.random.default_rng(7).integers(0, 256, (classes, *shape))
    values = (pictures[labels] * 3 + rng.integers(0, 64, (number, *shape))) // 4
    values = values > 127 if binary else values
    return {"image": values.astype(np.uint8), "label": labels.astype(np.int64)}


def sentences(rng, number):
    """Returns texts, each a walk over words whose followers are few."""
    followers = np.random.default_rng(8).integers(len(WORDS), size=(len(WORDS), 3))
    found = []
    for length in rng.integers(5, 30, size=number):
        at, words = int(rng.integers(len(WORDS))), []
        for pick in rng.integers(3, size=length):
            words.append(WORDS[at])
            at = int(followers[at, pick])
        found.append(" ".join(words))
    return np.array(found, dtype=object)


def molecules(rng, number):
    """Returns graphs of different sizes, whose labels are not all known."""
    found = []
    for nodes in rng.integers(6, 20, size=number):
        labels = (rng.random(128) < 0.2).astype(np.float32)
        labels[rng.random(128) < 0.1] = np.nan
        found.append(
            {
                "edge_feat": rng.random((2 * nodes, 3), np.float32),
                "edge_index": rng.integers(nodes, size=(2 * nodes, 2)).astype(np.int64),
                "labels": labels,
                "node_feat": rng.random((nodes, 9), np.float32),
                "num_edges": np.array([2 * nodes], np.int64),
                "num_nodes": np.array([nodes], np.int64),
            }
        )
    return found


def made(name, rng, number):
    """Returns the examples of a data set: a dictionary of arrays, or a list of dictionaries."""
    if name == "binarized_mnist":
        return {"image": images((28, 28, 1), 10, rng, number, binary=True)["image"]}
    if name in IMAGES:
        return images(*IMAGES[name], rng, number)
    if name == "glue/sst2":
        labels = rng.integers(2, size=number).astype(np.int64)
        texts = sentences(rng, number)
        return {"idx": np.arange(number, dtype=np.int32), "label": labels, "sentence": texts}
    if name.startswith("wmt"):
        texts = sentences(rng, number)
        return {"de": texts, "en": texts}
    if name == "ogbg_molpcba":
        return molecules(rng, number)
    if name == "tiny_shakespeare":
        return {"text": np.array(["\n".join(sentences(rng, 400))], dtype=object)}
    return {"text": sentences(rng, number)}


# ---- the interface -------------------------------------------------------------------------------


class Splits(dict):
    """The sizes of splits, and of parts of them such as ``train[:10%]``."""

    def absolute(self, split):
        if not isinstance(split, package.core.ReadInstruction):
            split = package.core.ReadInstruction.from_spec(split)
        return split.to_absolute(self)[0]

    def __missing__(self, split):
        part = self.absolute(split)
        begin, end, _ = slice(part.from_, part.to).indices(self[part.splitname].num_examples)
        return SimpleNamespace(num_examples=end - begin, name=str(split))


class Builder:
    """A data set that is made when it is read."""

    def __init__(self, name):
        self.name = name.partition(":")[0]
        self.number = 1 if self.name == "tiny_shakespeare" else NUMBER
        supervised = ("de", "en") if self.name.startswith("wmt") else ("image", "label")
        parts = {x: SimpleNamespace(num_examples=self.number, name=x) for x in PARTS}
        self.info = SimpleNamespace(
            name=self.name,
            features=features(self.name),
            splits=Splits(parts),
            supervised_keys=supervised,
        )

    def download_and_prepare(self, *args, **kwargs):
        """The examples are made when they are read."""

    def examples(self, split):
        """Returns the examples of a split such as ``train`` or ``validation[3:20]``."""
        part = self.info.splits.absolute(split)
        rng = np.random.default_rng(PARTS.index(part.splitname))
        found = made(self.name, rng, self.number)
        pick = slice(part.from_, part.to)
        if isinstance(found, list):
            return found[pick]
        return {name: values[pick] for name, values in found.items()}

    def as_dataset(
        self,
        split=None,
        decoders=None,
        as_supervised=False,
        batch_size=None,
        read_config=None,
        **_,
    ):
        if split is None:
            return {x: self.as_dataset(x, decoders, as_supervised) for x in self.info.splits}
        found = self.examples(split)
        if isinstance(found, list):
            ragged = {"edge_feat": 3, "edge_index": 2, "node_feat": 9}
            kinds = {
                k: tf.TensorSpec([None, ragged[k]] if k in ragged else x.shape, x.dtype)
                for k, x in found[0].items()
            }
            return tf.data.Dataset.from_generator(lambda: iter(found), output_signature=kinds)
        if getattr(read_config, "add_tfds_id", False):
            found["tfds_id"] = [f"{split}__{i}" for i in range(self.number)][: number_of(found)]
        if decoders and "image" in found:  # which leave images encoded
            found["image"] = [tf.io.encode_jpeg(x).numpy() for x in found["image"]]
        found = {k: tf.constant(list(v) if of_text(v) else v) for k, v in found.items()}
        if batch_size == -1:
            return found
        data = tf.data.Dataset.from_tensor_slices(found)
        supervised = self.info.supervised_keys
        return data.map(lambda x: tuple(x[k] for k in supervised)) if as_supervised else data


def number_of(found):
    return len(next(iter(found.values())))


def of_text(values):
    return isinstance(values, list) or values.dtype == object


def features(name):
    kinds = package.features
    if name in IMAGES or name == "binarized_mnist":
        shape, classes = IMAGES.get(name, ((28, 28, 1), 10))
        return {"image": kinds.Image(shape=shape), "label": kinds.ClassLabel(num_classes=classes)}
    if name == "glue/sst2":
        label = kinds.ClassLabel(num_classes=2)
        return {"idx": kinds.Scalar(np.int32), "label": label, "sentence": kinds.Text()}
    texts = ("de", "en") if name.startswith("wmt") else ("text",)
    return {text: kinds.Text() for text in texts}


class Source:
    """Single examples by number."""

    def __init__(self, builder, split):
        self.found = builder.examples(split)

    def __len__(self):
        return number_of(self.found)

    def __getitem__(self, number):
        one = {name: values[number] for name, values in self.found.items()}
        return {name: x.encode() if isinstance(x, str) else x for name, x in one.items()}

    def __repr__(self):
        return f"Source({len(self)})"


def each(split, make):
    return type(split)(map(make, split)) if isinstance(split, list | tuple) else make(split)


def builder(name, *args, **kwargs):
    return Builder(name)


def load(name, *, split=None, with_info=False, **settings):
    found = Builder(name)
    data = each(split, lambda one: found.as_dataset(one, **settings))
    return (data, found.info) if with_info else data


def data_source(name, *, split=None, **_):
    found = Builder(name)
    return each(split, lambda one: Source(found, one))


package = the_package()
tf = importlib.import_module("tensorflow")
package.load, package.builder, package.data_source = load, builder, data_source
# Data come in one order in each run.
random.seed(0)
np.random.seed(0)
tf.random.set_seed(0)
sys.modules[__name__] = package
