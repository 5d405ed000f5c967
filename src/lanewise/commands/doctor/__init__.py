"""Looks at the hosts of a run, and at the ways between them, and says which host is at fault."""
