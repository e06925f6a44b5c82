"""Findings: one pure function each, from facts to findings."""
