"""Typed configuration, presets and model geometry. Imports nothing heavy."""
