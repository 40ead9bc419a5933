"""Scenarios: their schema, the generator that makes them, and the fixed held-out file."""
