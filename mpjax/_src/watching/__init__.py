"""Precision watched while a program trains: what its half tensors hold, sampled on the device."""
