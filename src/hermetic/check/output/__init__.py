"""A check's report for people and for machines."""
