"""Watches precision during training: samples the contents of half tensors on the device."""
