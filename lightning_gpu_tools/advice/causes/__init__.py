"""Causes: of lost time, of full memory, and of stalls. Each has one file with everything about it.

``advice/order.py`` has the order in which they are judged. The report, ``lightning-gpu-tools explain``, the tables of
docs/ and the tests read them from there.
"""
