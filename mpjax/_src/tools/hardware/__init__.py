"""The capabilities of devices, and compilation for devices that are not present."""
