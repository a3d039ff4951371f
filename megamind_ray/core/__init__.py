"""Frozen types and pure state machines. No ray, no torch, no I/O, no clock."""
