"""Fits a key basis to a model."""
