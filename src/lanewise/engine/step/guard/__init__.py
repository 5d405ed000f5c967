"""What is looked at in the steps of a run, so that code which breaks what lanes rely on is named.

A new look is a file here, and a line in the list in `engine/step/build.py`.
"""
