"""Adapters for the training loops of other libraries."""
