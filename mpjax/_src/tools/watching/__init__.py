"""Watches precision during training: samples the contents of 16-bit tensors on the device."""
