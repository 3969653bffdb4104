"""The optimizer step against peers, in one run: `rowdit bench`, and what the benchmark programs share with it.

Read `measure.py` first: which contenders take their steps in which order, and what a ratio is.
"""
