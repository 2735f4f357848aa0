"""Grading, evaluation of the student alone, statistics."""
