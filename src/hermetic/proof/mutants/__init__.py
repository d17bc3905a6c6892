"""The faults of the field, put back one at a time: does anything here notice?"""
