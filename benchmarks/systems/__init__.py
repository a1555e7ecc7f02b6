"""Castline and each peer. A family is one engine in one environment; a system is a family with one set of weights."""
