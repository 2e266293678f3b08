"""What Equinox's examples use of torchvision: small made-up images, each its class's with noise."""

from torchvision import datasets as datasets
from torchvision import transforms as transforms
