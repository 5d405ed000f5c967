"""The observer of a program, in the process of the program.

It needs Python and torch alone, since lanewise may not be installed where the program runs. There its name is
`lanewise_observer`, so its modules import each other by relative names.
"""
