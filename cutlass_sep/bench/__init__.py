"""Measuring: inputs, accuracy, timing, peers, and the results files.

inputs -> accuracy (values first) -> timing + peers -> runner (rows) -> results (schema, digest).
"""
